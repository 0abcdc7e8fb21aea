// OpenAI's SDK for JavaScript, in Node.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.DEMO_URL + "/v1", apiKey: "none", maxRetries: 0 });
const fields = { model: "demo", messages: [{ role: "user", content: "What is 23 + 58?" }], temperature: 0 };

const names = [];
for await (const model of client.models.list()) names.push(model.id);
assert.deepEqual(names, ["demo"]);

const answer = await client.chat.completions.create(fields);
const text = answer.choices[0].message.content;
assert.match(text, /81/);
assert.ok(answer._request_id && answer.usage.completion_tokens > 0);

let joined = "", usage = null;
for await (const chunk of await client.chat.completions.create({
  ...fields, stream: true, stream_options: { include_usage: true },
})) {
  joined += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(joined, text);
assert.deepEqual(usage, answer.usage);
assert.equal((await client.chat.completions.stream(fields).finalChatCompletion()).choices[0].message.content, text);

const completion = await client.completions.create({ model: "demo", prompt: ["To be", "or not"], max_tokens: 4 });
assert.equal(completion.choices.length, 2);

const response = await client.responses.create({ model: "demo", input: "What is 23 + 58?", temperature: 0 });
assert.match(response.output_text, /81/);
const kinds = [];
for await (const event of await client.responses.create({ model: "demo", input: "Hi", stream: true })) kinds.push(event.type);
assert.equal(kinds[0], "response.created");
assert.equal(kinds.at(-1), "response.completed");

const answers = await Promise.all(Array.from({ length: 16 }, () => client.chat.completions.create(fields)));
assert.ok(answers.every((one) => one.choices[0].message.content === text));

await assert.rejects(client.chat.completions.create({ ...fields, temperature: -1 }), OpenAI.BadRequestError);
await assert.rejects(client.chat.completions.create({ ...fields, model: "other" }), (error) =>
  error instanceof OpenAI.NotFoundError && error.code === "model_not_found");

// One that leaves in the middle does no harm.
const stream = await client.completions.create({ model: "demo", prompt: "To be", max_tokens: 500, stream: true });
for await (const chunk of stream) { assert.ok(chunk.id); break; }
assert.equal((await client.chat.completions.create(fields)).choices[0].message.content, text);

const embedder = new OpenAI({ baseURL: process.env.EMBEDDER_URL + "/v1", apiKey: "none", maxRetries: 0 });
const vectors = await embedder.embeddings.create({ model: "embedder", input: ["To be", "or not"] });
assert.deepEqual(vectors.data.map((entry) => entry.embedding.length), [64, 64]);
