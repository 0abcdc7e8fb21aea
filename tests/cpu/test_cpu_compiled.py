"""C++ that is made of operators gives what torch's operators give, is kept, and keeps nobody waiting or alive."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
from torch._inductor.runtime.runtime_utils import default_cache_dir

from cpu import compiled
from cpu import ops as cpu_ops
from cpu import weights as cpu_weights
from cpu.compiled import (
    INDUCTOR_FOLDER,
    MANY,
    Builder,
    CompileJob,
    PendingLibrary,
    compile_job,
    compile_ops,
    keep,
    open_folders,
)
from device import startup
from engine import LLM, SamplingParams
from oracles import HeadNorm

ROOT = Path(__file__).parent.parent.parent
F32, BF16 = torch.float32, torch.bfloat16
FULL, LONG = pytest.mark.full, pytest.mark.long

pytestmark = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


class Here(Builder):
    """Compiles at once, in this process, which is faster for many small functions."""

    def ask(self, job: CompileJob, of_codes: bool = False) -> PendingLibrary:
        if not job.path():
            with torch.inference_mode(False):
                compile_job(job)
        return super().ask(job, of_codes)


def test_cpp_without_the_vectors_of_this_cpu_is_not_kept(monkeypatch, tmp_path):
    """Inductor falls back to narrower ones where its trial fails, say because the disk is full for a moment."""
    from torch._inductor import cpu_vec_isa

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_folders()
    job = CompileJob("activate", ("silu", True), (("float32", (8, 64)),), ((0,),), 1)
    for isa, capability in (("invalid", "AVX2"), ("avx2", "AVX512")):
        narrow = cpu_vec_isa.invalid_vec_isa if isa == "invalid" else cpu_vec_isa.VecAVX2()
        monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda narrow=narrow: narrow)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        with pytest.raises(RuntimeError, match=f"would have vectors of {narrow.bit_width()} bits"):
            compile_job(job)
        assert not job.path()


class Uncompiled(Builder):
    """Has the functions themselves in the place of their C++."""

    def ask(self, job: CompileJob) -> PendingLibrary:
        function = partial(getattr(compiled, job.name), *job.settings)

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            made = function(*tensors)
            return [made] if isinstance(made, torch.Tensor) else made

        return PendingLibrary(run)


@functools.cache
def ops_of(builder: type[Builder]) -> ModuleType:
    return compile_ops(builder(1))


def both(name: str, cases: list[tuple], brief: Callable[[tuple], bool]) -> pytest.MarkDecorator:
    """Cases of functions as they are, and of their C++, which takes long: only the `brief` ones are full."""
    plain = [pytest.param(Uncompiled, *case, id=f"plain {case}") for case in cases]
    made = [pytest.param(Here, *case, id=f"C++ {case}", marks=FULL if brief(case) else LONG) for case in cases]
    return pytest.mark.parametrize(f"builder, {name}", plain + made)


def small_job(size: int = 4) -> CompileJob:
    """A job: SiLU of `size` elements a row."""
    return CompileJob("activate", ("silu", False), (("float32", (8, size)),), ((0,),), 1)


def settled(builder: Builder, job: CompileJob) -> PendingLibrary:
    """What a job's process leaves, once it has ended."""
    late = builder.ask(job)
    for thread in builder.threads:
        thread.join()
    return late


def test_what_another_machine_or_other_settings_made_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Builder, "_make", lambda *_: None)
    others = small_job(5), small_job()._replace(threads=2), small_job()._replace(settings=("gelu", False))
    assert len({job.key() for job in (small_job(), *others)}) == 4  # each needs other code
    builder = Builder(1)
    keep(others[0], b"of another machine")
    assert builder.ask(others[0]).run is None and not others[0].path()  # it will be made anew


@pytest.mark.full
def test_what_is_compiled_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    headers, shared = tmp_path / "manta" / "headers", tmp_path / "shared"
    shared.mkdir()
    open_folders()
    inductor = Path(default_cache_dir())
    (headers / inductor.name).symlink_to(inductor)  # compiling its headers anew would take most of a minute
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "inductor"))
    x, builder = torch.randn(3, 4), Builder(2)
    library = builder.ask(small_job())
    assert library.run is None  # nobody waits for it
    builder.wait()
    torch.testing.assert_close(library.run([x])[0], torch.nn.functional.silu(x))
    assert [path.parent for path in tmp_path.rglob("*.so")] == [tmp_path / "manta" / "compiled"]
    assert not list(shared.iterdir())  # Inductor's own files are not where others may write
    monkeypatch.setattr(Builder, "_make", lambda *_: None)
    torch.testing.assert_close(Builder(1).ask(small_job()).run([x])[0], torch.nn.functional.silu(x))


@pytest.mark.parametrize("urgent", [True, False])
def test_a_server_waits_for_products_with_codes_alone(monkeypatch, tmp_path, caplog, urgent):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran: list[tuple[str, bool]] = []
    monkeypatch.setattr(Builder, "_run", lambda builder, job, idle: ran.append((job.key(), idle)))
    monkeypatch.setattr(CompileJob, "load", lambda job: print if ran else Path("nowhere").read_bytes())
    builder = Builder(1, idle=True, delay=1e5, urgent=urgent)
    plain, coded = builder.ask(small_job()), builder.ask(small_job(5), True)
    with caplog.at_level("INFO", logger="manta"):
        builder.wait_for_codes()
    assert ran == ([(small_job(5).key(), False)] if urgent else [])
    assert (coded.run is not None) == urgent and plain.run is None and len(caplog.records) == urgent


def damage(path: Path, how: str) -> None:
    """Make a kept file one that must not be opened."""
    if how == "cut":
        os.truncate(path, path.stat().st_size // 10)
    elif how == "another's":
        os.chown(path, 12345, 12345)
    else:
        path.chmod(0o666)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
DAMAGES = ["cut", "writable", pytest.param("another's", marks=AS_ROOT)]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_library_that_is_cut_or_may_be_anothers_is_never_opened(monkeypatch, tmp_path, caplog, how):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Builder, "_make", lambda *_: None)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelContainerRunnerCpu", None)  # opening it would be an error
    builder = Builder(1)
    keep(small_job(), b"a library" * 1000)
    damage(small_job().path(), how)
    with caplog.at_level("INFO", logger="manta"):
        assert builder.ask(small_job()).run is None and not small_job().path()
    assert len(caplog.records) == 1 and "the C++ of activate is made again" in caplog.text


@pytest.mark.parametrize("how", DAMAGES[1:])
@pytest.mark.parametrize("name", ["manta", "manta/compiled", "manta/headers"])
def test_a_folder_that_others_may_write_to_is_not_used(monkeypatch, tmp_path, caplog, name, how):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / name).mkdir(parents=True)
    damage(tmp_path / name, how)
    monkeypatch.setattr(CompileJob, "load", None)
    with caplog.at_level("INFO", logger="manta"):
        builder = Builder(1)
        assert builder.ask(small_job()).run is None and not builder.threads
    assert len(caplog.records) == 1 and f"serve: a place of compiled C++ is '{tmp_path / name}', which" in caplog.text
    with pytest.raises(ValueError, match="compiling failed"):
        builder.wait()


def test_what_a_killed_process_leaves_is_swept_a_day_later(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Builder(1)
    home = tmp_path / "manta" / "compiled"
    assert [path.stat().st_mode & 0o777 for path in (home, home.parent, home.parent / "headers")] == [0o700] * 3
    code = "import time; from cpu import compiled\nwith compiled.workplace() as path:\n print(path, flush=True)\n"
    code += " time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        path = Path(process.stdout.readline().strip())
        Builder(1)
        assert path.parent == home and path.is_dir()
        process.kill()
    Builder(1)
    assert path.is_dir()
    os.utime(path, (0, 0))  # long ago
    Builder(1)
    assert not path.exists()


def test_after_a_failure_the_operators_serve_and_one_line_says_why(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failing = ["sh", "-c", "head -c 1 > /dev/null; echo a warning; echo no compiler; exit 3"]
    monkeypatch.setattr(compiled, "run_file", lambda *_, environment, **streams: subprocess.Popen(failing, **streams))
    builder = Builder(1)
    with caplog.at_level("INFO", logger="manta"):
        for size in (4, 5, 6):
            assert settled(builder, small_job(size)).run is None
    (record,) = caplog.records
    assert record.getMessage().endswith("torch's operators serve: activate: no compiler")
    with pytest.raises(ValueError, match="compiling failed: activate: no compiler"):
        builder.wait()


@pytest.mark.full
def test_without_a_compiler_the_operators_serve_and_one_line_says_why(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    builder = Builder(1)
    with caplog.at_level("INFO", logger="manta"):
        for size in (4, 5, 6):
            assert settled(builder, small_job(size)).run is None
    assert len(caplog.records) == 1 and "no more C++ is made, and torch's operators serve: activate: " in caplog.text
    with pytest.raises(ValueError, match=r"compiling failed: .*InvalidCxxCompiler"):
        builder.wait()


@pytest.mark.full
def test_looking_for_a_compiler_leaves_nothing(tmp_path):
    code = "from cpu import compiled; print(compiled.has_compiler())"
    env = {name: value for name, value in os.environ.items() if name != INDUCTOR_FOLDER} | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n" and not list(tmp_path.iterdir())


@pytest.mark.full
def test_the_compiling_process_ends_with_its_parent(tmp_path):
    job = "c.CompileJob('activate', ('silu', False), (('float32', (8, 64)),), ((0,),), 1)"
    code = f"from cpu import compiled as c\nb = c.Builder(1, idle=True)\nb.ask({job})\nb.wait()"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    while not (children := psutil.Process(parent.pid).children(recursive=True)):  # compiling has not begun
        assert parent.poll() is None
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert gone and not alive


@pytest.mark.long
def test_a_large_model_answers_while_its_cpp_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_weights, "SMALL", 1)
    allowed, jobs = threading.Event(), []

    def make_later(builder: Builder, job: CompileJob, late: PendingLibrary, urgent: bool) -> None:
        jobs.append((builder, job))
        allowed.wait()
        with builder.room:
            compile_job(job)  # in this process, which is faster
            late.run = job.load()

    monkeypatch.setattr(Builder, "_make", make_later)
    prompts = [f"What is {a} + 58? " * 10 for a in range(20, 28)]
    params = [SamplingParams(temperature=0.8, seed=3, max_tokens=20 + i, ignore_eos=True) for i in range(len(prompts))]

    def answers(llm: LLM) -> list[list[list[int]]]:
        some = slice(0, 8), slice(3, 5), slice(0, 1)
        return [[out.outputs[0].token_ids for out in llm.generate(prompts[s], params[s])] for s in some]

    llm, plain = LLM("demo", dtype="float32"), LLM("demo", dtype="float32", enforce_eager=True)
    wanted = answers(plain)
    assert answers(llm) == wanted and not list(tmp_path.rglob("*.so"))
    allowed.set()
    jobs[0][0].wait()
    made = len(list(tmp_path.rglob("*.so")))
    assert made == len(jobs) == 6  # norm, RoPE and activation, for few tokens and for many
    assert answers(llm) == wanted and len(jobs) == made
    monkeypatch.setattr(Builder, "_make", None)  # all is kept
    llm = LLM("demo", dtype="float32", compile=True)
    assert answers(llm) == wanted
    assert llm.core.facts["compile_seconds"] > 0 == plain.core.facts["compile_seconds"]


def test_what_contradicts_compile_is_refused():
    for options, words in (({"backend": "reference"}, "not for 'reference'"), ({"enforce_eager": True}, "one of them")):
        with pytest.raises(ValueError, match=f"compile is True.*{words}"):
            LLM("demo", device="cpu", compile=True, **options)


@pytest.mark.long
@pytest.mark.parametrize("sequences", [1, 2])
def test_compiled_steps_in_bfloat16_read_the_same_layouts_and_compile_nothing_more(monkeypatch, sequences):
    monkeypatch.setattr(startup, "Builder", Here)
    options, questions = {"dtype": "bfloat16", "max_num_seqs": sequences}, ["What is 23 + 58?", "What is 40 + 2?"]
    llm, plain = LLM("demo", compile=True, **options), LLM("demo", enforce_eager=True, **options)
    monkeypatch.setattr(Here, "ask", None)
    layers = [llm.core.executor.worker.model.layers[0] for llm in (llm, plain)]
    kinds = [[type(x) for x in (y.attention.qkv, y.attention.o, y.mlp.gate_up, y.mlp.down)] for y in layers]
    assert kinds[0] == kinds[1] and ({*kinds[0]} == {cpu_weights.PanelLinear}) == (sequences == 1)
    for some in (questions, questions[:1]):
        chats = [[{"role": "user", "content": question}] for question in some]
        answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=8))
        assert [answer.outputs[0].text for answer in answers] == ["81", "42"][: len(some)]


SIZES = [1, 2, MANY - 1, MANY, 3 * MANY + 1]


@both("dtype, tokens", [*itertools.product((F32, BF16), SIZES)], lambda case: case[0] == F32)
def test_compiled_ops_are_the_plain_ones(builder, dtype, tokens):
    compiled_ops = ops_of(builder)
    torch.manual_seed(0)
    x, weight, gate_up = (torch.randn(*shape).to(dtype) for shape in ((tokens, 96), (96,), (tokens, 66)))
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 2**-7}  # both round once
    for residual in (None, torch.randn(tokens, 96).to(dtype)):
        sums = [None if residual is None else residual.clone() for _ in range(2)]
        got, want = (
            ops.rms_norm(x, weight, 1e-5, total) for ops, total in zip((compiled_ops, cpu_ops), sums, strict=True)
        )
        torch.testing.assert_close(got, want, **close)
        assert residual is None or torch.equal(*sums)
    for name, arguments in (("act_mul", ("silu",)), ("act", ("xielu", torch.ones(2)))):
        got, want = (getattr(ops, name)(gate_up, *arguments) for ops in (compiled_ops, cpu_ops))
        torch.testing.assert_close(got, want, **close)
        assert got.shape == want.shape and got.is_contiguous()


@both("kinds", [((BF16, None),), ((F32, BF16),)], lambda case: case[0][0] == BF16)
def test_compiled_norms_take_weights_of_other_types(builder, kinds):
    """The first call has no bias and compiles for weights of x's own type, which the second must not be given to."""
    compiled_ops = ops_of(builder)
    x, weight, bias = (None if kind is None else torch.randn(96).to(kind) for kind in (torch.bfloat16, *kinds))
    x, sums = x.expand(5, -1).contiguous(), [torch.ones(5, 96).bfloat16() for _ in range(4)]
    for i, ops in enumerate((compiled_ops, cpu_ops)):
        ops.rms_norm(x, weight, 1e-5, sums[i])
    got, want = (ops.rms_norm(x, weight, 1e-5, s) for ops, s in zip((compiled_ops, cpu_ops), sums, strict=False))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2**-7)
    got, want = (
        ops.layer_norm(x, weight, bias, 1e-5, s) for ops, s in zip((compiled_ops, cpu_ops), sums[2:], strict=True)
    )
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2**-7)
    assert torch.equal(sums[2], sums[3])


ROPES = [
    (7, HeadNorm("rms"), 32, False),
    (1, HeadNorm("rms"), 32, False), (200, HeadNorm("rms"), 32, False),
    (1, HeadNorm(), 16, True), (7, HeadNorm(), 16, True), (7, HeadNorm("layer", True, True), 16, False),
    (7, HeadNorm("scales", True, False, True), 32, False), (7, HeadNorm("layer"), 0, False),
    (7, HeadNorm("rms", values=True), 32, False),
]  # fmt: skip


@both("tokens, norm, rotated, interleaved", ROPES, lambda case: case is ROPES[0])
def test_compiled_rope_is_the_plain_one(builder, tokens, norm, rotated, interleaved):
    compiled_ops = ops_of(builder)
    torch.manual_seed(0)
    qkv, rotation = torch.randn(tokens, (4 + 2 * 2) * 32).bfloat16(), torch.randn(tokens, 2, rotated)
    norms = [norm.weights(heads, 32, torch.bfloat16) for heads in (4, 2)]
    options = norm.options(torch.rand(tokens, 2) + 0.5)
    slots = torch.randperm(20 * 16)[:tokens]
    slots[::5] = -1 if tokens > 1 else 300  # -1 stores nothing
    pools = [torch.zeros(20, 3, 2, 2, 16, 32, dtype=torch.bfloat16) for _ in range(2)]
    got, want = (
        ops.qk_norm_rope_store(qkv.clone(), *norms, 1e-6, rotation, slots, pool[:, 1], interleaved, *options)
        for ops, pool in zip((compiled_ops, cpu_ops), pools, strict=True)
    )
    torch.testing.assert_close(got, want, atol=1e-2, rtol=2**-7)  # sums of products that may cancel
    torch.testing.assert_close(*pools, atol=1e-2, rtol=2**-7)
    assert pools[0].count_nonzero()
    alone = qkv[:, : 4 * 32].contiguous()
    if norms[0] is None or norms[0].ndim == 1:  # without k and v
        args = (*[norms[0]] * 2, 1e-6, rotation, slots, pools[0][:, 1, :, :0], interleaved, *options)
        torch.testing.assert_close(compiled_ops.qk_norm_rope_store(alone, *args), want, atol=1e-2, rtol=2**-7)
        torch.testing.assert_close(*pools, atol=1e-2, rtol=2**-7)
