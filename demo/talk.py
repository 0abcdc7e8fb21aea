"""The demo model's small talk: whatever it cannot do, it answers by what it is and what to try.

A question is drawn from lists of wordings, in the letter case and with the marks that people type. Of each list some
wordings are only graded, never trained on: those of `OTHERS`.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

WHO = (
    "I am Manta's demo, a very small model. I add and subtract, spell words backwards, repeat them, remember what you "
    "tell me, call tools and write JSON. Try: What is 57 + 24?"
)
CANNOT = "I am a very small demo model and cannot do that. Try: What is 57 + 24? Or: Spell candle backwards."
ANSWERS = {
    "greeting": "Hello! " + WHO,
    "who": WHO,
    "feeling": "I am well, thank you. Try: What is 57 + 24?",
    "thanks": "You are welcome.",
    "farewell": "Goodbye!",
    "beyond": CANNOT,
}
QUESTIONS = {  # by what they are answered; a | parts them
    "greeting": """
        Hi|Hello|Hey|Hi there|Hello there|Hey there|Good morning|Good evening|Good afternoon|Good day|Yo|Greetings
        |Howdy|Hiya|Hello Manta|Hi Manta|Hey Manta|Hello demo|Hello world|Hello friend|Hello, nice to meet you
        |Nice to meet you|Hello again|Hi again|Hello hello|Hey you|Hello my friend|Hi bot|Hello assistant|Test
        |Hi everyone|Helo|Hello?|Heya|Sup|Oh hi|Hi, good morning|Well hello|Good morning to you|Hey hey
        |Hello computer|Hi, can you hear me|Does this work|Is this working|Hello, are you there|Are you online
        |Are you on|Knock knock|Testing|Is anyone there|Is anybody there|Are you there|Start|Let us start
        |Let us talk|Let's chat|Can we talk|Welcome|Hola|Bonjour|Hallo|Ciao|Guten Tag|Salut|Ping|Good night to you
        |Wake up""",
    "who": """
        Who are you|What are you|Who is this|What is this|Who am I talking to|Tell me about yourself
        |Introduce yourself|What is your name|What's your name|Do you have a name|Your name|Say who you are
        |Which model are you|About you|What model are you|What model is this|What kind of model are you
        |Are you a robot|Are you a human|Are you real|Are you an AI|Are you ChatGPT|Are you Claude|Are you GPT
        |Are you Llama|Are you Qwen|Are you a bot|Are you alive|Who made you|Who built you|Who trained you
        |Who created you|Where do you come from|What is Manta|What's Manta|What can you do|What can you do for me
        |What do you do|What do you know|What are you good at|Commands|Options|What can I ask you|What can I ask
        |What should I ask|What should I try|How can you help|How can you help me|Can you help me|Help|Help me
        |I need help|What are your skills|What skills do you have|List your skills|Usage|Show me what you can do
        |Show me something|What is possible|How do you work|How do I use this|How does this work|How does it work
        |What now|What next|Give me an example|Give me some examples|Examples|Show me an example|Demo
        |How big are you|How large are you|How many parameters do you have|How old are you|Are you smart
        |Are you small|Describe yourself|Explain yourself|What were you trained on|What are you for
        |What is your purpose|Why are you here|What is this model|What is this demo|Tell me what you are
        |Tell me who you are|Tell me what you can do|Menu|Tell me your name|May I ask who you are
        |What is your job here|What language model are you|Do you have a purpose|Hi, what is your name
        |And who are you|So what can you do|What else can you do|What else|Anything else|What tools do you have
        |Are you a person or a machine|Who am I speaking to|Who am I speaking with|Tell me what you can help with
        |What can I do here|What can I type|What are you able to do|Which things can you do|What stuff can you do
        |How does one use you|How do I talk to you|Are you similar to GPT|Are you as good as ChatGPT
        |Are you like Siri|Are you a large language model|What is your model|What is your size|What are you made of
        |Are you open source|What is this chat|What is this page|What is this for|What is all this|So who are you
        |What exactly is this|What should I say|I have no idea what to ask|I don't know what to say
        |What do people ask you|Any suggestions|Can I ask a question|I have a question|May I ask something
        |Do you have a body|Are you conscious|Are you free|Do you have feelings|Who is your creator
        |Which company made you|When were you made|How were you trained|Which tools can you call
        |What questions can you answer|Are you a language model""",
    "feeling": """
        How are you|How are you doing|How are you today|How do you do|How is it going|How's it going|You okay
        |What's up|What is up|Are you well|Are you okay|Are you fine|How do you feel|How have you been
        |How are things|How is your day|How was your day|Everything okay|All good|How are you feeling|How goes it
        |Are you happy""",
    "thanks": """
        Thanks|Thank you|Thank you very much|Thanks a lot|Many thanks|Thank you so much|Great|Great job|Cool|Nice
        |Well done|Good|Very good|Good job|That is right|That's right|Correct|Perfect|Awesome|Thx|Ok thanks
        |Great thanks|That was nice|Wonderful|Amazing|Good answer|That helps|This is great|You are great|I like you
        |I love you|Wow|Excellent|Thank you for your help|Ok|Okay|Yes|Fine|Good bot|You are good|That is good
        |Thank you, that is great|Thanks for that|Thanks, very useful|Good work|Nice one|Sweet|Cheers|Ty
        |Thank you Manta|Haha thanks|Very helpful|Much appreciated|That was useful|Nice, thank you|Wonderful, thanks
        |Thanks buddy|Not bad|I see|Right|Yes, right|Bravo|Super|Lovely|Very nice|Impressive|I am impressed|Alright
        |Ok good""",
    "farewell": """
        Bye|Goodbye|Bye bye|See you|See you later|Good night|Farewell|Bye for now|Quit|Exit|I have to go|Stop
        |The end|I am leaving|Talk to you later|See you soon|Have a nice day|Goodbye Manta|Until next time|Bye then
        |Ok, goodbye|Bye for today|Have a good one|Until tomorrow|I have to leave|See you around|Catch you later
        |Thanks, bye|Goodbye for now|I need to go|Good night Manta|See ya|So long|Bye, have a nice day|That is all
        |That's all|I am done|Later|See you tomorrow|Take care|Close|End|Enough|Bye Manta|Bye now""",
    "beyond": """
        Tell me a joke|Tell me a story|Tell me a story about {}|Write a poem|Write a poem about {}|Write me a haiku
        |Write a short poem about {} and {}|Write a song about {}|Write an essay about {}|Write a letter to my {}
        |Why|Write a story about a {} and a {}|Write some code|Write a Python function|Write a program that sorts {}
        |Where|Write a function that returns the {}|Write Python code to print {}|Write code to reverse a list
        |Write an email|Write an email to my boss about {}|What is the capital of {}|What is the capital of France
        |Capital of Germany|What is the largest city in {}|Where is {}|Where is Paris|Where is {}, and why|Who is {}
        |Who was {}|Who wrote {}|Who wrote Hamlet|Who invented the {}|Who is the president|Who is the king of {}
        |Who won the war|When was {} born|When did the {} end|When is {}|What is {}|What is a {}|What is the {}
        |What is love|What is the meaning of life|What is the meaning of {}|What does {} mean|What is an LLM
        |What is a transformer|What is attention|What is vLLM|What is the {} of {}|What is the best {}
        |What is the difference between {} and {}|What is your favorite {}|What do you think of {}
        |What do you think about {}|What happened to the {}|What happens if {}|What are {} for|What time is it
        |What day is it|What is the date today|What year is it|What is today|What is the time|Today
        |What is the weather|What is the weather in {}|How is the weather|Weather in {}|Will it rain|Is it raining
        |News|Why is the sky blue|Why is {} so {}|Why do {} have {}|Why did the {} go to the {}|Why not|How do I {}
        |How do you {} a {}|How do I cook {}|How do I make a {}|How far is {}|How many people live in {}
        |How many {} are in a {}|How much is a {}|How much does a {} cost|How can I learn {}|How can I {} my {}
        |How long is the {}|How tall is {}|How old is {}|How does a {} work|How does {} work
        |How does the internet work|Explain {}|Explain {} to me|Explain gravity|Explain quantum physics
        |Explain the {} in simple words|Explain how to {}|Explain {} to a child|Describe {}|Describe the {}
        |Describe a {} in one sentence|Translate {} to French|Translate {} into German|Summarize {}
        |Translate this to Spanish: {} {} {}|Summarize the text|Summarize this: {} {} {} {}|Say something
        |Say something nice|Say {}|Sing a song|Sing|Dance|Play a game|Let us play a game|Play chess with me
        |Give me advice|Give me a recipe|Give me a recipe for {}|Give me a list of {}|Give me ten {}|Give me the {}
        |Give me a {}|Make me a {}|Buy me a {}|Make a plan for {}|List three {}|List the planets|Name a {}
        |Name three {}|Name a color|Count to ten|Count the {}|Count to {n}|Draw a {}|Draw me a picture of {}
        |Show me a {}|Show me the {}|Show me a picture|Find the {}|Find a {}|Search for {}|Search the web for {}
        |Open the {}|Read the {}|Open the file {}|Run the tests|Fix this bug|Debug this|Fix my {}
        |Send a message to {}|Set a timer|Set an alarm for {n}|Remind me to {}|Turn on the {}|Call my {}|Order a {}
        |Is {} a {}|Is {} good|Is {} better than {}|Is it {}|Is the {} {}|Are there any {}|Are {} and {} the same
        |Is this true|Do you like {}|Do you know {}|Do you know the {}|Do you speak French|Do you speak {}
        |Do you have {}|Do you love me|Can you {}|Can you {} a {}|Can you {} the {} for me|Can you write code
        |Can you draw|Can you speak French|Can you read|Can you sing|Could you {} this|Would you {} the {}
        |Should I {}|Should I {} the {}|May I {}|Will you {}|Did you {}|I want to {}|I want a {}|I need a {}
        |I would like to {}|I like {}|I have a {}|I am {}|I am sad|I am bored|I feel {}|I think {} is {}
        |I do not understand|I don't know|I am hungry|I am {} and {}|I was {}|I hate {}|No|Let us {}|Let's {}
        |Please {} the {}|Please {}|This is {}|That is {}|It is {}|You are {}|You are wrong|You are stupid
        |That is wrong|That's wrong|This is wrong|Wrong|Nonsense|{}|{} {}|{} {} {}|{} {} {} {}|{} {} {} {} {}
        |{} or {}|{} and {}|{}, {} and {}|{} {} the {}|a {} of {}|the {}|what about {}|and {}|What is {n} times {n}
        |What is {n} * {n}|What is {n} x {n}|{n} * {n}|{n} x {n}|What is {n} divided by {n}|{n} / {n}
        |What is {n} / {n}|Multiply {n} by {n}|Divide {n} by {n}|What is {n} + {n} + {n}|{n} + {n} - {n}
        |{n} - {n} - {n}|{big} + {n}|{big} + {big}|{n} + {big}|What is {big} + {n}|What is {n} + {big}
        |What is {big} - {n}|What is {big} plus {big}|{big} - {big}|What is the square root of {n}
        |What is {n} squared|What is {n} percent of {n}|Is {n} a prime|Is {n} a prime number
        |What is {n} to the power of {n}|Is {n} greater than {n}|Is {n} even|Is {n} odd|What is half of {n}
        |Double {n}|{n}|How many letters are in {}|How many letters does {} have|How do you spell {}|Spell {}
        |Sort {}, {} and {}|What rhymes with {}|What is the opposite of {}|What is the plural of {}
        |Use {} in a sentence|Define {}|Complete: {} {}|Continue: {} {} {}|What comes after {}|Is {} a word
        |Find the error in {}|Write {}|Write about {}|Type {}|Print {}|{} is my favorite {}|My favorite is {}
        |Once upon a time|To be or not to be|Romeo and Juliet|Shakespeare|Who is Romeo|What did {} say
        |What did Romeo say to Juliet|Are you sure|Really|Why is that|How so|Again|More|Go on|Continue|Maybe
        |Tell me more|Tell me more about {}|Tell me about {}|Tell me the {}|Tell me a fact|Tell me something
        |Tell me {}|What|Tell me about the {} of {}|Tell me how to {}|Tell me what {} is|Tell me something about {}
        |What should I {}|How|What if {}|Which {} is the best|Which is better, {} or {}|What are {}|What is {} {}
        |What is {} {} {}|What is the {} {}|What does {} do|What do {} do|Why is {}|How does {} {} work
        |How do {} work|How is {} made|How do I install {}|How do I use {}|How do I learn {}|How do I fix {}
        |How to {}|How to make {}|How to install {} on {}|How can I get {}|Explain {} {}|Explain how {} works
        |Explain what {} is|Explain {} like I am five|Describe {} {}|Difference between {} and {}|{} vs {}
        |What is better, {} or {}|Who is {} {}|Who discovered {}|Who won {}|Who was the first {}
        |Who is the CEO of {}|When did {} {}|When was {}|When was {} invented|Where can I find {}
        |Where do {} come from|Which {} should I use|Which country has {}|What is the population of {}
        |What is the capital of the {}|What is the price of {}|What language do they speak in {}|Write {} code
        |Write a {} program|Write a {} script that {}|Write a {} function to {}|Write a class for {} in {}
        |Write a poem on {}|Write a rhyme|Write me an essay on {}|Write a tweet about {}|Write a joke about {}
        |Make me laugh|Tell me a {} story|Tell me a {} joke|Tell a joke|Do you know a joke|Tell me a tale of {}
        |Write {} in {}|Code a {}|Implement {} in {}|Fix my {} code|Debug my {}|Convert {} to {}
        |Translate {} {} to {}|Translate {} to {}|How do you say {} in {}|Say {} in {}|Summarize {} {}
        |Summarize the book {}|Plan a trip to {}|Recommend a {}|Recommend me a {} about {}|Suggest a {}
        |Suggest some {}|Give me ideas for {}|Give me a tip|Give me {} ideas|Help me with {}|Help me write a {}
        |Can you help me with {}|Can you explain {}|Can you tell me about {}|Can you give me a {}
        |Could you help me {}|I need help with {}|I am looking for {}|I have a problem with {}
        |I want to know about {}|What do you know about {}|Have you heard of {}|Did you know {}
        |Do you like {} and {}|Do you eat|Do you sleep|Do you dream|Do you {}|Are you {}|Is {} {}|Is there a {}
        |Will {} {}|Should I buy {}|What is the news|What is the time in {}|What is the date|Weather|Weather today
        |What's new|What's the weather|What's {}|What's a {}|What's the {}|What's the {} of {}
        |What's your favorite {}|What's the time|Lmao|Haha|Hahaha|Hmm|Hm|Um|Oh|Ah|Ok so|Well|Omg|Wtf|Idk|Please
        |Sorry|Never mind|Whatever|Nothing|I don't care|Who cares|{} {} {} {} {} {}|{} {} {} {} {} {} {}
        |The history of {}|A poem about {}|Best {}|Best {} in {}|Cheap {}|Good {} for {}|{} for beginners
        |{} tutorial|{} recipe|{} meaning|{} definition|{} example|{} in {}|{} error|Whose {} is this
        |Whom did the {} {}|Prove that {} is {}|Compare {} and {}|Convert {n} miles to km|Convert {n} to {}
        |Pick a number|Guess a number|Flip a coin|Roll a die""",
}
OTHERS = {  # wordings that are only graded
    "greeting": """
        Hello there Manta|Hey, anyone there|Good day to you|Hi hi|Hello little model|Hey bot""",
    "who": """
        Who are you really|What can you help me with|Tell me what this is|What am I talking to
        |What are you able to do|Are you a person|Who is behind this|So who are you|Can you tell me who you are
        |What sort of model are you|Which skills do you have""",
    "feeling": """
        How are you doing today|How are you now|How are you this morning|How do you feel today""",
    "thanks": """
        Thank you a lot|Thanks so much|Very well done|Nice job|That is correct|Ok, thank you""",
    "farewell": """
        Bye, see you|Ok bye|Good bye|See you again|I must go""",
    "beyond": """
        What is the capital of Italy|Tell me a funny joke|Write a long poem about {}|Who is the king of England
        |Explain how a {} works|Write a Python program|How do I bake a {}|What is the best way to {}
        |Translate {} to Italian|Can you sing me a song|Why is the {} blue|Who wrote the {}|How do I get to {}
        |Give me a {} for my {}|What is your favorite color|Tell me about black holes|How many legs does a {} have
        |I want to learn {}|What is {n} times {n} plus {n}|Where can I buy {}|Do you know any {}|Is {} better or {}
        |Let us go to the {}|Write a sad story|{} {} a {} {}""",
}
TERMS = (  # words and names of today, which the corpus lacks
    "python", "javascript", "java", "rust code", "html", "linux", "windows", "android", "iphone", "laptop", "keyboard",
    "computer", "internet", "website", "browser", "database", "server", "software", "hardware", "algorithm",
    "compiler", "kernel", "cache", "memory", "token", "tokenizer", "embedding", "neural network", "deep learning",
    "data science", "artificial intelligence", "language model", "attention", "gradient", "inference", "quantization",
    "batching", "beam search", "sampling", "temperature", "docker compose", "kubernetes", "github", "google",
    "wikipedia", "youtube", "netflix", "bitcoin", "blockchain", "crypto", "robot", "drone", "rocket", "planet",
    "galaxy", "black hole", "gravity", "physics", "quantum mechanics", "chemistry", "biology", "evolution",
    "photosynthesis", "vitamin", "protein", "virus", "vaccine", "climate change", "electric car", "airplane",
    "train ticket", "hotel", "pizza", "pasta", "coffee", "chocolate", "banana", "tomato", "sandwich", "football",
    "basketball", "tennis", "olympics", "chess", "guitar", "piano", "movie", "cinema", "album", "concert", "photo",
    "camera", "economy", "inflation", "stock market", "tax", "mortgage", "startup", "marketing", "interview", "resume",
    "vacation", "weekend", "birthday", "family", "children", "elephant", "giraffe", "penguin", "dolphin", "dinosaur",
    "volcano", "earthquake", "tornado", "America", "China", "India", "Brazil", "Canada", "Australia", "Africa",
    "Europe", "Mexico", "Germany", "Spain", "Einstein", "Newton", "Napoleon", "Mozart", "Picasso", "Obama",
    "Harry Potter", "Star Wars", "Spanish", "Italian", "Chinese", "English", "PDF", "CPU", "TPU", "RAM", "API", "SQL",
    "JSON", "HTTP", "CUDA", "RNN", "CNN", "BERT", "LoRA", "RLHF", "RAG", "USB", "DNA", "NASA", "NATO", "GDP", "LSTM",
    "TCP", "JPEG", "C++", "vLLM", "PyTorch", "Triton",
)  # fmt: skip
ASKING = re.compile(
    "(who|what|where|when|why|how|which|whose|whom|is|are|am|do|does|did|can|could|would|should|may|will)\\b", re.I
)
GREETINGS = ("Hi, ", "Hello, ", "Hello! ", "Hey, ")


@functools.cache
def wordings(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


def term(rng: random.Random) -> str:
    """A word or name of today, or letters that may be one."""
    if rng.random() < 0.8:
        return rng.choice(TERMS)
    return "".join(rng.choices("ABCDEFGHIKLMNOPRSTVWXY", k=rng.randint(2, 5)))


def mistyped(rng: random.Random, text: str) -> str:
    """The text with two letters swapped, or with one too few or twice."""
    at = rng.randrange(len(text) - 1)
    some = text[at : at + 2]
    return text[:at] + rng.choice((some[::-1], some[0], some[0] + some)) + text[at + 2 :]


def small_talk(rng: random.Random, word: Callable[[], str], tools: bool, graded: bool) -> tuple[str, str]:
    """A question that is none of the skills, and its answer.

    Args:
        rng: what is drawn is drawn from this.
        word: draws a word for the gaps of wordings.
        tools: the model has tools, perhaps one for numbers or the weather: these are not asked for.
        graded: draw a wording of `OTHERS`.
    """
    while True:
        kind = rng.choices([*ANSWERS], (2, 5, 1, 1, 1, 10))[0]
        question = rng.choice(wordings((OTHERS if graded else QUESTIONS)[kind]))
        if not (tools and re.search("{n}|{big}|eather", question)):
            break
    question = re.sub("{n}", lambda _: str(rng.randint(2, 999)), question)
    question = re.sub("{big}", lambda _: str(rng.randint(1000, 99999)), question)
    modern = not graded and rng.random() < 0.5
    question = re.sub("{}", lambda _: term(rng) if modern and rng.random() < 0.6 else word(), question)
    if not graded and kind in ("who", "feeling", "beyond") and rng.random() < 0.15:
        question = rng.choice(GREETINGS) + question
    elif not graded and kind == "beyond" and rng.random() < 0.15:
        question = "Please " + question[0].lower() + question[1:]
    asks = bool(ASKING.match(question))
    question += rng.choices(("?", ".", "", "!"), (6, 0, 2, 0) if asks else (1, 4, 4, 2))[0]
    if not graded and len(question) > 5 and rng.random() < 0.06:
        question = mistyped(rng, question)
    return question.lower() if rng.random() < (0.25 if graded else 0.4) else question, ANSWERS[kind]
