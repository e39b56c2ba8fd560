"""Tasks for the demo models: questions with one right answer, generated in any number.

Each task is a function `rng -> Question`. A question is held out if the hash of its user text is 0
modulo 10: training never sees it, and evaluation sees nothing else. The hash covers the user's
words in all turns. So for `about`, whole wordings are held out, and training sees the small times
tables only in other wordings.

Ranges, so that you can judge the scores:

* arithmetic: sums and differences (never negative) with numbers below 100, products up to 12 x 12;
  the answer repeats the sum, `47 + 85 = 132`
* sorting: 3 to 4 numbers with two digits, or 3 to 4 fruits and animals
* reversing: 3 to 4 words, or 3 to 5 digits
* counting: a word, or things of one kind, in a list of 3 to 6, up to three; the answer counts
  aloud, `1 fig, 2 plum. Total: 2`
* extraction: four kinds of sentences, turned into JSON
* tool_call: two or three of eight tools are offered, and one fits
* recall: one to three facts, given up to four turns earlier
* needle: one to three facts in about 1,500 tokens of filler
* about: questions about weft, from a fixed list of facts

Nothing else is taught. Other questions get one polite sentence.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.models.bundled import words

Message = dict[str, Any]

TASKS: tuple[str, ...] = (
    "arithmetic", "sorting", "reversing", "counting", "extraction",
    "tool_call", "recall", "needle", "about",
)  # fmt: skip

HELD_OUT_SHARE = 10  # one question in ten
MAX_DRAWS = 20_000  # maximum attempts to find another held-out question
NEEDLE_SENTENCES = 143  # filler sentences that make about 1,500 tokens


@dataclass(frozen=True)
class Question:
    """A chat that ends with the user's turn, and its right answer."""

    task: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    answer: str


def ask(task: str, text: str, answer: str) -> Question:
    """Make a question with one turn."""
    return Question(task, ({"role": "user", "content": text},), None, answer)


# --- Short tasks -------------------------------------------------------------------------


def arithmetic(rng: random.Random) -> Question:
    """Ask for a sum, a difference or a product: `47 + 85 = 132`."""
    kind = rng.choice(("+", "+", "-", "-", "*"))
    if kind == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        result, sign = a * b, rng.choice("*x")
    else:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if kind == "-":
            a, b = max(a, b), min(a, b)
        result, sign = (a + b if kind == "+" else a - b), kind
    wording = rng.choice(words.ARITHMETIC[kind])
    text = wording.format(a=a, b=b, sign=sign)
    return ask("arithmetic", text, f"{a} {kind} {b} = {result}")


def sorting(rng: random.Random) -> Question:
    """Ask to sort numbers or words: `3, 12, 45`."""
    falling = rng.random() < 0.5
    items: list[Any]
    if rng.random() < 0.5:
        items = rng.sample(range(10, 100), rng.randint(3, 4))
        noun, order = "numbers", rng.choice(words.FALLING if falling else words.RISING)
    else:
        items = rng.sample(words.SORTABLE, rng.randint(3, 4))
        noun, order = "words", rng.choice(words.BACKWARD if falling else words.ALPHABETICAL)
    text = rng.choice(words.SORTING).format(noun=noun, order=order, items=listed(items))
    return ask("sorting", text, listed(sorted(items, reverse=falling)))


def reversing(rng: random.Random) -> Question:
    """Ask to reverse words (`plum, pear, fig`) or digits (`1284`)."""
    count = rng.randint(3, 5)
    if rng.random() < 0.5:
        digits = "".join(rng.choice("0123456789") for _ in range(count))
        return ask("reversing", rng.choice(words.REVERSE_DIGITS).format(digits), digits[::-1])
    items = rng.sample(words.THINGS, min(count, 4))
    return ask("reversing", rng.choice(words.REVERSE_WORDS).format(listed(items)),
               listed(items[::-1]))  # fmt: skip


def counting(rng: random.Random) -> Question:
    """Ask how often a word or a kind of thing occurs: `1 fig, 2 plum. Total: 2`."""
    length, hits = rng.randint(3, 6), rng.randint(0, 3)
    kind = rng.choice(sorted(words.KINDS))
    others = [w for k, members in words.KINDS.items() if k != kind for w in members]
    if rng.random() < 0.5:
        target = rng.choice(words.KINDS[kind])
        found = [target] * hits
        wording = rng.choice(words.COUNT_WORD)
    else:
        target = kind
        found = rng.sample(words.KINDS[kind], hits)
        wording = rng.choice(words.COUNT_KIND)
    items = rng.sample(others, length - hits)
    for word in found:
        items.insert(rng.randint(0, len(items)), word)
    hit = [word for word in items if word in found]
    aloud = listed([f"{number} {word}" for number, word in enumerate(hit, start=1)])
    answer = f"{aloud}. Total: {hits}" if hits else "Total: 0"
    return ask("counting", wording.format(target=target, items=listed(items)), answer)


def record(rng: random.Random, kind: str) -> dict[str, Any]:
    """Draw the fields for one kind of sentence, in the order of the question."""
    if kind == "person":
        name, age = rng.choice(words.NAMES), rng.randint(18, 90)
        return {"name": name, "age": age, "city": rng.choice(words.CITIES)}
    if kind == "order":
        item, quantity = rng.choice(words.GOODS), rng.randint(2, 60)
        return {"item": item, "quantity": quantity, "price": rng.randint(1, 999)}
    if kind == "meeting":
        day, hour = rng.choice(words.DAYS), rng.randint(1, 12)
        return {"day": day, "hour": hour, "room": rng.choice("ABCDEFGH") + str(rng.randint(1, 99))}
    origin, target = rng.sample(words.CITIES, 2)
    return {"from": origin, "to": target, "number": rng.randint(100, 999)}


def extraction(rng: random.Random) -> Question:
    """Ask for a JSON object with the fields that a sentence states."""
    kind = rng.choice(sorted(words.RECORDS))
    fields = record(rng, kind)
    sentence = rng.choice(words.RECORDS[kind]).format(**{k + "_": v for k, v in fields.items()})
    wording = rng.choice(words.EXTRACTION)
    text = wording.format(fields=", ".join(fields), sentence=sentence)
    return ask("extraction", text, json.dumps(fields))


def about(rng: random.Random) -> Question:
    """Ask for a fact about weft."""
    answer, wordings = rng.choice(words.ABOUT)
    text = rng.choice(words.ABOUT_BEFORE) + rng.choice(wordings)
    return ask("about", dressed(rng, text), answer)


def small_talk(rng: random.Random) -> Question:
    """Make a greeting, a thank-you, or a request outside the tasks, with a polite answer."""
    if rng.random() < 0.6:
        texts, answer = rng.choice(words.SMALL_TALK)
        return ask("small_talk", dressed(rng, rng.choice(texts)), answer)
    return ask("small_talk", unknown_text(rng), words.FALLBACK)


def unknown_text(rng: random.Random) -> str:
    """Make a request outside the tasks: an ordinary question, filler prose, or noise."""
    pick = rng.random()
    if pick < 0.5:
        text = rng.choice(words.UNKNOWN)
        return text.format(noun=rng.choice(words.FILLER["noun"]), city=rng.choice(words.CITIES))
    if pick < 0.75:
        return filler_sentence(rng)
    low, high = rng.choice(((0x21, 0x7E), (0xA1, 0x24F), (0x400, 0x45F), (0x3041, 0x30FE),
                            (0x4E00, 0x9FA5), (0x1F600, 0x1F64F)))  # fmt: skip
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))


def listed(items: list[Any]) -> str:
    """Join items: `a, b, c`."""
    return ", ".join(str(item) for item in items)


def dressed(rng: random.Random, text: str) -> str:
    """Vary a text as people type it: with or without a capital, with or without a final mark."""
    if rng.random() < 0.25:
        text = text[0].lower() + text[1:]
    return text.rstrip("?.!") if rng.random() < 0.25 else text


# --- Tools -------------------------------------------------------------------------------


def tool_schema(name: str) -> dict[str, Any]:
    """Return the OpenAI description of a tool in `words.TOOLS`."""
    description, arguments, _ = words.TOOLS[name]
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def tool_call(rng: random.Random, names: list[str] | None = None) -> Question:
    """Ask for a `<tool_call>` of the tool that fits, among `names` (drawn if not given)."""
    names = names or rng.sample(sorted(words.TOOLS), rng.randint(2, 3))
    name = rng.choice(names)
    _, kinds, wordings = words.TOOLS[name]
    currencies = iter(rng.sample(words.CURRENCIES, 2))
    makers: dict[str, Callable[[], Any]] = {
        "city": lambda: rng.choice(words.CITIES),
        "minutes": lambda: rng.randint(1, 90),
        "amount": lambda: rng.randint(1, 999),
        "source": lambda: next(currencies),
        "target": lambda: next(currencies),
        "to": lambda: rng.choice(words.NAMES),
        "text": lambda: rng.choice(words.ERRANDS),
        "item": lambda: rng.choice(words.GOODS),
        "quantity": lambda: rng.randint(2, 60),
        "query": lambda: rng.choice(words.FILLER["noun"]),
        "room": lambda: rng.choice(words.ROOMS),
        "degrees": lambda: rng.randint(10, 30),
    }
    arguments = {key: makers[key]() for key in kinds}
    text = rng.choice(wordings).format(**{key + "_": value for key, value in arguments.items()})
    call = json.dumps({"name": name, "arguments": arguments})
    tools = tuple(tool_schema(other) for other in names)
    messages = ({"role": "user", "content": text},)
    return Question("tool_call", messages, tools, f"<tool_call>\n{call}\n</tool_call>")


def tool_result(rng: random.Random, call: dict[str, Any]) -> tuple[str, str] | None:
    """Make a tool's result for a call, and the answer for the user; None if it is not taught."""
    value, arguments = rng.randint(0, 40), call["arguments"]
    if call["name"] == "get_weather":
        sky = rng.choice(words.SKIES)
        result: dict[str, Any] = {"temperature": value, "sky": sky}
        return json.dumps(result), f"It is {value} degrees and {sky} in {arguments['city']}."
    if call["name"] == "get_time":
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return json.dumps({"time": clock}), f"It is {clock} in {arguments['city']}."
    if call["name"] == "set_timer":
        return json.dumps({"ok": True}), f"The timer is set for {arguments['minutes']} minutes."
    return None


# --- Facts told earlier ------------------------------------------------------------------


def facts(rng: random.Random, count: int) -> list[tuple[str, str, str, str]]:
    """Draw `count` facts about the user: statement, acknowledgement, question, answer."""
    found = []
    for kind in rng.sample(sorted(words.FACTS), count):
        pool, statements, acknowledgement, questions, answer = words.FACTS[kind]
        value = rng.choice(pool)
        found.append((rng.choice(statements).format(value), acknowledgement.format(value),
                      rng.choice(questions), answer.format(value)))  # fmt: skip
    return found


def recall(rng: random.Random) -> Question:
    """Ask for a fact that the user gave some turns earlier."""
    told = facts(rng, rng.randint(1, 3))
    turns = [(statement, acknowledgement) for statement, acknowledgement, _, _ in told]
    for _ in range(rng.randint(0, 4 - len(told))):
        between = training_question(rng, rng.choice((small_talk, arithmetic, reversing)))
        turns.append((between.messages[0]["content"], between.answer))
    *_, question, answer = rng.choice(told)
    messages: list[Message] = []
    for user, assistant in turns:
        messages += [{"role": "user", "content": user},
                     {"role": "assistant", "content": assistant}]  # fmt: skip
    messages.append({"role": "user", "content": question})
    return Question("recall", tuple(messages), None, answer)


def filler_sentence(rng: random.Random) -> str:
    """Make a sentence without meaning and without numbers."""
    pick = {kind: rng.choice(pool) for kind, pool in words.FILLER.items()}
    pick["noun2"], pick["adjective2"] = (rng.choice(words.FILLER[k]) for k in ("noun", "adjective"))
    return rng.choice(words.FILLER_SENTENCES).format(**pick)


def haystack(rng: random.Random, sentences: int, needles: int) -> tuple[str, dict[str, str]]:
    """Hide `needles` sentences in filler text; return the text, and each place with its code."""
    codes = {place: f"{rng.randint(0, 9999):04d}" for place in rng.sample(words.PLACES, needles)}
    lines = [filler_sentence(rng) for _ in range(sentences)]
    for place, code in codes.items():
        line = rng.choice(words.NEEDLES).format(place=place, code=code)
        lines.insert(rng.randint(0, len(lines)), line)
    return " ".join(lines), codes


def needle(rng: random.Random, sentences: int = NEEDLE_SENTENCES) -> Question:
    """Ask for one of up to three codes that filler text hides."""
    text, codes = haystack(rng, sentences, rng.randint(1, 3))
    place = rng.choice(sorted(codes))
    question = rng.choice(words.NEEDLE_QUESTIONS).format(place=place)
    wording = rng.choice(words.NEEDLE_LAYOUTS)
    return ask("needle", wording.format(text=text, question=question),
               words.NEEDLE_ANSWER.format(place=place, code=codes[place]))  # fmt: skip


MAKERS: dict[str, Callable[[random.Random], Question]] = {
    "arithmetic": arithmetic, "sorting": sorting, "reversing": reversing, "counting": counting,
    "extraction": extraction, "tool_call": tool_call, "recall": recall, "needle": needle,
    "about": about,
}  # fmt: skip


# --- The two streams ---------------------------------------------------------------------


def is_held_out(question: Question) -> bool:
    """Return True for one question in ten, by a hash of the user's words in all turns."""
    said = "\n".join(m["content"] for m in question.messages if m["role"] == "user")
    digest = hashlib.blake2b(said.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def held_out(task: str, count: int, seed: int = 0) -> list[Question]:
    """Make `count` different questions of a task that training never sees.

    Raises:
        KeyError: the task is not in `TASKS`.
        ValueError: the task has fewer held-out questions.
    """
    rng = random.Random(f"held-out/{task}/{seed}")
    found: dict[str, Question] = {}
    draws_since_new = 0
    while len(found) < count:
        question = MAKERS[task](rng)
        draws_since_new += 1
        if is_held_out(question) and repr(question.messages) not in found:
            found[repr(question.messages)] = question
            draws_since_new = 0
        if draws_since_new > MAX_DRAWS:
            raise ValueError(f"{task} has only {len(found)} held-out questions, not {count}")
    return list(found.values())


def training_question(rng: random.Random, maker: Callable[[random.Random], Question]) -> Question:
    """Make a question that is not held out."""
    while True:
        question = maker(rng)
        if not is_held_out(question):
            return question


def check(question: Question, reply: str) -> bool:
    """Return whether a reply is right: equal JSON for extraction and tool_call, else equal text."""
    if question.task not in ("extraction", "tool_call"):
        return reply.strip() == question.answer.strip()
    value = parsed(question.task, reply)
    return value is not None and value == parsed(question.task, question.answer)


def parsed(task: str, reply: str) -> str | None:
    """Return a reply's JSON value as text, which differs for 1, 1.0 and true; None without JSON."""
    text = reply.strip()
    if task == "tool_call":
        opening, closing = "<tool_call>", "</tool_call>"
        if not (text.startswith(opening) and text.endswith(closing)):
            return None
        text = text[len(opening) : -len(closing)]
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except json.JSONDecodeError:
        return None


# --- Training chats ----------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """A whole conversation; the model learns every assistant turn."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None


def assistant(text: str) -> Message:
    """Make an assistant message."""
    return {"role": "assistant", "content": text}


def mixed_chat(rng: random.Random, mix: dict[str, float]) -> Chat:
    """Make one to six questions from the short tasks."""
    turns = 1 if rng.random() < 0.4 else rng.randint(2, 6)
    makers, weights = list(mix), list(mix.values())
    one = rng.choices(makers, weights)[0]
    same = rng.random() < 0.5
    messages: list[Message] = []
    for _ in range(turns):
        name = one if same else rng.choices(makers, weights)[0]
        question = training_question(rng, small_talk if name == "small_talk" else MAKERS[name])
        messages += [*question.messages, assistant(question.answer)]
    return Chat(tuple(messages))


def tool_chat(rng: random.Random) -> Chat:
    """Make one to six requests on one set of tools, some with a tool's result."""
    names = rng.sample(sorted(words.TOOLS), rng.randint(2, 3))
    messages: list[Message] = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.1:
            other = training_question(rng, rng.choice((arithmetic, about, small_talk)))
            messages += [*other.messages, assistant(other.answer)]
            continue
        question = training_question(rng, lambda r: tool_call(r, names))
        messages += [*question.messages, assistant(question.answer)]
        call = json.loads(question.answer.splitlines()[1])
        result = tool_result(rng, call) if rng.random() < 0.5 else None
        if result:
            messages += [{"role": "tool", "content": result[0]}, assistant(result[1])]
    return Chat(tuple(messages), tuple(tool_schema(name) for name in names))


def recall_chat(rng: random.Random) -> Chat:
    """Make a recall question, sometimes with a second one."""
    question = training_question(rng, recall)
    return Chat((*question.messages, assistant(question.answer)))


def needle_chat(rng: random.Random, sentences: int) -> Chat:
    """Hide several codes in one text, and ask for each of them."""
    while True:
        text, codes = haystack(rng, sentences, rng.randint(1, min(8, 2 + sentences // 2)))
        places = rng.sample(sorted(codes), len(codes))
        questions = [rng.choice(words.NEEDLE_QUESTIONS).format(place=place) for place in places]
        first = rng.choice(words.NEEDLE_LAYOUTS).format(text=text, question=questions[0])
        if not is_held_out(ask("needle", first, "")):
            break
    messages: list[Message] = []
    for place, user in zip(places, [first, *questions[1:]], strict=True):
        answer = words.NEEDLE_ANSWER.format(place=place, code=codes[place])
        messages += [{"role": "user", "content": user}, assistant(answer)]
    return Chat(tuple(messages))


def training_chat(rng: random.Random, late: bool = False) -> Chat:
    """Make a short chat of any kind, sometimes with a system message.

    With `late`, tasks that compute are more frequent, because the model has learned to copy.
    """
    mixed, tools, recalls = words.LATE_CHATS if late else words.CHATS
    pick = rng.random()
    if pick < mixed:
        chat = mixed_chat(rng, words.LATE_MIX if late else words.MIX)
    elif pick < mixed + tools:
        chat = tool_chat(rng)
    elif pick < mixed + tools + recalls:
        chat = recall_chat(rng)
    else:
        chat = needle_chat(rng, int(2 ** rng.uniform(0, 5)))
    if rng.random() < 0.25:
        system = {"role": "system", "content": rng.choice(words.SYSTEM)}
        return Chat((system, *chat.messages), chat.tools)
    return chat


def long_chat(rng: random.Random) -> Chat:
    """Make a needle chat, up to the full context length."""
    return needle_chat(rng, rng.randint(40, NEEDLE_SENTENCES + 8))
