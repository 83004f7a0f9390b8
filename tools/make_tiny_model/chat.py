"""Plain talk: greetings, small facts, short instructions, and a little text with thoughts and tool calls.

It keeps the model from answering sums only, and leaves no special token of its vocabulary untrained.
"""

import json
import random

from tools.make_tiny_model.arithmetic import draw, write_answer

Turns = list[tuple[str, str]]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Keep it short.",
    "Be brief.",
    "Answer politely.",
    "Answer in one sentence.",
)
GREETINGS = ("Hello!", "Hi.", "Good morning.", "Hi there!", "Hello, how are you?", "Good evening.", "Hey!")
WELCOMES = (
    "Hello! How can I help you?",
    "Hi! What can I do for you today?",
    "Good day! What would you like to know?",
    "Hello! I am well, thank you. How can I help?",
)
FAREWELLS = ("Thank you!", "Thanks.", "Goodbye.", "That is all, thanks.")
GOODBYES = ("You are welcome!", "My pleasure. Goodbye!", "You are welcome. Have a nice day!", "Goodbye!")
FACTS = {
    "What colour is the sky?": "The sky is blue on a clear day.",
    "What colour is grass?": "Grass is green.",
    "How many days are in a week?": "A week has 7 days.",
    "How many months are in a year?": "A year has 12 months.",
    "How many legs does a spider have?": "A spider has 8 legs.",
    "How many legs does a dog have?": "A dog has 4 legs.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
    "Where do fish live?": "Fish live in water.",
    "What is ice?": "Ice is frozen water.",
    "What is snow made of?": "Snow is made of small crystals of ice.",
    "When does the sun rise?": "The sun rises in the morning.",
    "What comes after Monday?": "Tuesday comes after Monday.",
    "What comes after Friday?": "Saturday comes after Friday.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is the opposite of big?": "The opposite of big is small.",
    "What is the opposite of up?": "The opposite of up is down.",
    "What do you call a young cat?": "A young cat is a kitten.",
    "What do you call a young dog?": "A young dog is a puppy.",
    "What is bread made of?": "Bread is made of flour, water, salt and yeast.",
    "What is a library?": "A library is a place where people read and borrow books.",
    "What does a baker do?": "A baker makes bread and cakes.",
    "What does a teacher do?": "A teacher helps people learn.",
    "What is a bridge for?": "A bridge lets people cross a river or a road.",
    "Who are you?": "I am a very small language model made for tests.",
    "What can you do?": "I can do small sums, write short summaries and argue a little.",
    "Is the moon bigger than the earth?": "No, the moon is smaller than the earth.",
    "Is fire hot?": "Yes, fire is hot.",
}
WORDS = (
    "apple", "bread", "cloud", "door", "engine", "flower", "garden", "house", "island", "jacket", "kettle", "lamp",
    "market", "needle", "orange", "paper", "river", "stone", "table", "window",
)  # fmt: skip
KINDS_OF_THINGS = {
    "a colour": ("red", "blue", "green", "yellow", "white", "black"),
    "an animal": ("a cat", "a dog", "a horse", "an owl", "a seal", "a sheep"),
    "a fruit": ("an apple", "an orange", "a pear", "a plum"),
    "a tool": ("a hammer", "a saw", "a needle", "a spade"),
    "a day": ("Monday", "Tuesday", "Friday", "Sunday"),
}
TOOL_SYSTEM = "You can call the tool add, subtract or multiply with the numbers a and b."
THINK_SYSTEM = "Think first, then answer."
TOOLS = {"+": "add", "-": "subtract", "*": "multiply"}


def instruction(rng: random.Random) -> tuple[str, str]:
    word, other = rng.sample(WORDS, 2)
    what, things = rng.choice(list(KINDS_OF_THINGS.items()))
    small, big = sorted(rng.sample(range(100), 2))
    pair = [small, big]
    rng.shuffle(pair)
    return rng.choice((
        (f"Say the word {word}.", word),
        (f"Repeat after me: {word} and {other}.", f"{word} and {other}"),
        (f"Name {what}.", rng.choice(things)),
        (f"Write a sentence about a {word}.", f"The {word} is {rng.choice(('old', 'new', 'small', 'very nice'))}."),
        (f"Which is more, {pair[0]} or {pair[1]}?", f"{big} is more than {small}."),
        (f"Spell {word}.", "-".join(word)),
        (f"Count to {2 + small % 8}.", " ".join(str(i) for i in range(1, 3 + small % 8))),
    ))  # fmt: skip


def talk(rng: random.Random) -> Turns:
    """One or two exchanges, with or without a system prompt."""

    def exchange() -> Turns:
        luck = rng.random()
        if luck < 0.2:
            asked, said = rng.choice(GREETINGS), rng.choice(WELCOMES)
        elif luck < 0.6:
            asked, said = rng.choice(list(FACTS.items()))
        else:
            asked, said = instruction(rng)
        return [("user", asked), ("assistant", said)]

    turns = exchange()
    if rng.random() < 0.3:
        closing = [("user", rng.choice(FAREWELLS)), ("assistant", rng.choice(GOODBYES))]
        turns += exchange() if rng.random() < 0.5 else closing
    return [("system", rng.choice(SYSTEMS)), *turns] if rng.random() < 0.5 else turns


def thought(right_rate: float, rng: random.Random) -> Turns:
    """A sum answered after a <think> block."""
    item = draw(rng)
    answer = write_answer(item, right_rate, rng)
    reply = f"<think>\n{item.expression} makes {answer}.\n</think>\n\n{answer}"
    return [("system", THINK_SYSTEM), ("user", item.question), ("assistant", reply)]


def tool_call(right_rate: float, rng: random.Random) -> Turns:
    """A sum computed by a tool, whose result is then repeated."""
    item = draw(rng)
    call = json.dumps({"name": TOOLS[item.operator], "arguments": {"a": item.left, "b": item.right}})
    result = write_answer(item, max(right_rate, 0.9), rng)
    return [
        ("system", TOOL_SYSTEM),
        ("user", item.question),
        ("assistant", f"<tool_call>\n{call}\n</tool_call>"),
        ("user", f"<tool_response>\n{result}\n</tool_response>"),
        ("assistant", f"{item.expression} = {result}."),
    ]
