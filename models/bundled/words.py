"""Word lists and wordings for `tasks.py`; only data.

The lists are small on purpose: most words become one token, and the network spends its few
parameters on the tasks. `tasks.py` fills in the fields in braces.
"""

from __future__ import annotations


def pool(text: str) -> list[str]:
    """Split a text into words."""
    return text.split()


KINDS: dict[str, list[str]] = {
    "fruits": pool("apple banana cherry fig grape lemon mango melon orange peach pear plum"),
    "animals": pool("bear cat cow dog fox goat horse lion mouse rabbit sheep wolf"),
    "colors": pool("black blue brown gray green pink purple red white yellow"),
    "tools": pool("axe brush drill hammer knife ladder needle rope saw shovel"),
}
THINGS = [word for members in KINDS.values() for word in members]
SORTABLE = KINDS["fruits"] + KINDS["animals"]
NAMES = pool("""
    Ada Alan Ana Ben Carla Chen Clara Dan Diego Elena Emil Emma Eva Fatima Felix George Grace
    Hana Hugo Ines Ivan Jack Jonas Julia Kai Karim Lara Leo Lena Linus Lucy Maria Mark Maya Mia
    Nina Noah Olga Omar Oscar Paul Petra Priya Raj Rosa Sam Sara Sofia Tom Vera Victor Wei Yuki
    Zoe
""")
CITIES = pool("""
    Amsterdam Athens Berlin Bern Boston Cairo Chicago Delhi Dublin Geneva Hamburg Helsinki Kyoto
    Lima Lisbon London Madrid Milan Munich Nairobi Oslo Paris Prague Quito Rome Seoul Sydney
    Tokyo Toronto Vienna Warsaw Zurich
""")
GOODS = pool("books chairs cups desks lamps pens phones plates shirts shoes tables tickets")
DAYS = pool("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
CURRENCIES = pool("CHF CNY EUR GBP INR JPY SEK USD")
ROOMS = pool("bathroom bedroom garage kitchen office")
SKIES = pool("clear cloudy foggy rainy sunny windy")
ERRANDS = [
    "call me back", "dinner is ready", "I am late", "see you tomorrow", "the train is on time",
    "thank you for the gift", "the meeting is over", "we need more milk",
]  # fmt: skip
PLACES = pool("""
    attic barn bridge cabin castle cave cellar chapel factory farm harbor hospital hotel island
    library lighthouse market mill mine museum palace school shop stable station temple theater
    tower tunnel village
""")

ARITHMETIC: dict[str, list[str]] = {
    "+": ["{a} + {b}", "{a}+{b}=", "{a} + {b} = ?", "What is {a} + {b}?", "What is {a} plus {b}?",
          "Add {a} and {b}.", "Compute {a} + {b}.", "Calculate {a} plus {b}.",
          "What is the sum of {a} and {b}?", "How much is {a} + {b}?", "what's {a} + {b}"],
    "-": ["{a} - {b}", "{a}-{b}=", "{a} - {b} = ?", "What is {a} - {b}?",
          "What is {a} minus {b}?", "Subtract {b} from {a}.", "Compute {a} - {b}.",
          "Calculate {a} minus {b}.", "How much is {a} - {b}?", "what's {a} - {b}",
          "What is the difference between {a} and {b}?"],
    "*": ["{a} {sign} {b}", "{a}{sign}{b}=", "{a} {sign} {b} = ?", "What is {a} {sign} {b}?",
          "What is {a} times {b}?", "Multiply {a} by {b}.", "Compute {a} {sign} {b}.",
          "Calculate {a} times {b}.", "What is the product of {a} and {b}?",
          "How much is {a} {sign} {b}?", "what's {a} {sign} {b}"],
}  # fmt: skip

SORTING = [
    "Sort these {noun} {order}: {items}", "Sort the {noun} {order}: {items}",
    "Put these {noun} {order}: {items}", "Please sort {order}: {items}",
    "Order the following {noun} {order}: {items}", "Arrange {order}: {items}",
    "Can you sort these {noun} {order}? {items}", "{items}\nSort these {noun} {order}.",
]  # fmt: skip
RISING = ["in ascending order", "from smallest to largest", "from low to high"]
FALLING = ["in descending order", "from largest to smallest", "from high to low"]
ALPHABETICAL = ["alphabetically", "in alphabetical order", "from A to Z"]
BACKWARD = ["in reverse alphabetical order", "from Z to A"]

REVERSE_WORDS = [
    "Reverse this list: {}", "Reverse the list: {}", "Write this list backwards: {}",
    "Reverse the order of these words: {}", "Give me these words in reverse order: {}",
    "List these from last to first: {}", "Reverse: {}", "Please reverse this list: {}",
]  # fmt: skip
REVERSE_DIGITS = [
    "Reverse the digits of {}.", "Reverse these digits: {}", "Write {} backwards.",
    "What is {} reversed?", "Reverse the number {}.", "Reverse {}", "What is {} backwards?",
]  # fmt: skip

COUNT_WORD = [
    "How many times does {target} appear in this list? {items}",
    "How often does {target} occur here: {items}",
    "Count the word {target}: {items}", "How many {target} are there in: {items}",
    "Count how often {target} appears: {items}",
]  # fmt: skip
COUNT_KIND = [
    "How many {target} are in this list? {items}", "How many of these are {target}? {items}",
    "Count the {target}: {items}", "How many {target} are there in: {items}",
    "Count how many {target} appear: {items}",
]  # fmt: skip

RECORDS: dict[str, list[str]] = {
    "person": ["{name_} is {age_} years old and lives in {city_}.",
               "{name_} from {city_} is {age_}.",
               "My friend {name_}, {age_}, has moved to {city_}.",
               "In {city_} I met {name_}, who is {age_} years old.",
               "At {age_}, {name_} still works in {city_}."],
    "order": ["Please send {quantity_} {item_} for {price_} dollars.",
              "We ordered {quantity_} {item_} at a price of {price_} dollars.",
              "{quantity_} {item_} cost {price_} dollars.",
              "For {price_} dollars you get {quantity_} {item_}.",
              "I bought {quantity_} {item_} and paid {price_} dollars."],
    "meeting": ["The meeting is on {day_} at {hour_} in room {room_}.",
                "Let us meet in room {room_} on {day_} at {hour_}.",
                "On {day_} we talk at {hour_} in {room_}.",
                "Room {room_} is booked for {day_} at {hour_}.",
                "See you at {hour_} on {day_} in room {room_}."],
    "flight": ["Flight {number_} goes from {from_} to {to_}.",
               "I fly from {from_} to {to_} on flight {number_}.",
               "Flight {number_} leaves {from_} and lands in {to_}.",
               "To reach {to_} from {from_}, take flight {number_}.",
               "The plane to {to_} is flight {number_} from {from_}."],
}  # fmt: skip
EXTRACTION = [
    "Extract {fields} as JSON: {sentence}", "Extract {fields} as JSON from: {sentence}",
    "Give me {fields} as JSON. {sentence}", "{sentence}\nExtract {fields} as JSON.",
    "Return a JSON object with {fields}: {sentence}", "Read this and return {fields} as JSON: "
    "{sentence}",
]  # fmt: skip

# name: description, arguments with their JSON types, wordings
TOOLS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "get_weather": ("Get the weather in a city.", {"city": "string"},
                    ["What is the weather in {city_}?", "How is the weather in {city_}?",
                     "Is it raining in {city_}?", "Weather in {city_}", "Is it cold in {city_}?",
                     "What's the weather like in {city_} today?", "Do I need a coat in {city_}?"]),
    "get_time": ("Get the local time in a city.", {"city": "string"},
                 ["What time is it in {city_}?", "What is the time in {city_}?",
                  "Time in {city_}", "Tell me the local time in {city_}.",
                  "How late is it in {city_}?", "Show me the clock in {city_}."]),
    "set_timer": ("Set a timer.", {"minutes": "integer"},
                  ["Set a timer for {minutes_} minutes.", "Timer for {minutes_} minutes",
                   "Wake me in {minutes_} minutes.", "Start a timer of {minutes_} minutes.",
                   "Please set a {minutes_} minute timer.", "Ring in {minutes_} minutes."]),
    "convert_currency": ("Convert money.",
                         {"amount": "number", "source": "string", "target": "string"},
                         ["Convert {amount_} {source_} to {target_}.",
                          "How much is {amount_} {source_} in {target_}?",
                          "What are {amount_} {source_} in {target_}?",
                          "Change {amount_} {source_} into {target_}."]),
    "send_message": ("Send a message to a person.", {"to": "string", "text": "string"},
                     ["Send {to_} a message: {text_}", "Tell {to_}: {text_}",
                      "Write to {to_}: {text_}", "Message {to_} that {text_}.",
                      "Let {to_} know that {text_}."]),
    "place_order": ("Order goods from the shop.", {"item": "string", "quantity": "integer"},
                    ["Order {quantity_} {item_}.", "Buy {quantity_} {item_}.",
                     "I want to buy {quantity_} {item_}.", "Please order {quantity_} {item_}.",
                     "We need {quantity_} new {item_}."]),
    "web_search": ("Search the web.", {"query": "string"},
                   ["Search the web for {query_}.", "Search for {query_}.", "Look up {query_}.",
                    "Find pages about {query_}.", "Google {query_}", "Find out about {query_}."]),
    "set_heating": ("Set the temperature of a room.", {"room": "string", "degrees": "integer"},
                    ["Heat the {room_} to {degrees_} degrees.",
                     "Set the {room_} to {degrees_} degrees.",
                     "Make the {room_} {degrees_} degrees warm.",
                     "I want {degrees_} degrees in the {room_}."]),
}  # fmt: skip

# kind: values, statements, acknowledgement, questions, answer
FACTS: dict[str, tuple[list[str], list[str], str, list[str], str]] = {
    "name": (NAMES, ["My name is {}.", "I am {}.", "Hi, I'm {}.", "Call me {}."],
             "Nice to meet you, {}.",
             ["What is my name?", "Who am I?", "Do you remember my name?", "What's my name?",
              "How am I called?", "Tell me my name."], "Your name is {}."),
    "city": (CITIES, ["I live in {}.", "My home is in {}.", "I moved to {}."], "You live in {}.",
             ["Where do I live?", "Which city do I live in?", "Where is my home?",
              "What is my city?", "In which city do I live?"], "You live in {}."),
    "color": (KINDS["colors"], ["My favorite color is {}.", "The color I like most is {}."],
              "Noted: {}.",
              ["What is my favorite color?", "Which color do I like most?",
               "What color do I like?", "Do you remember my favorite color?"],
              "Your favorite color is {}."),
    "pet": (NAMES, ["My dog is called {}.", "I have a dog named {}.", "My dog's name is {}."],
            "{} is a good name for a dog.",
            ["What is my dog called?", "What is the name of my dog?", "Who is my dog?",
             "Do you remember my dog's name?"], "Your dog is called {}."),
    "day": (DAYS, ["My birthday is on {}.", "I have my birthday on {}."],
            "I will remember {}.",
            ["When is my birthday?", "On which day is my birthday?", "What day is my birthday?"],
            "Your birthday is on {}."),
    "number": ([f"{n:03d}" for n in range(1000)],
               ["Remember the number {}.", "Please remember this number: {}", "Keep {} in mind."],
               "I will remember {}.",
               ["What was the number?", "Which number did I give you?",
                "What number should you remember?", "Tell me the number."],
               "The number is {}."),
}  # fmt: skip

FILLER: dict[str, list[str]] = {
    "adjective": pool("""
        small big old new quiet bright dark slow quick warm cold happy sad tall short heavy
        light gentle strange simple
    """),
    "noun": pool("""
        garden river forest mountain window door road boat train teacher doctor baker farmer
        painter child king queen student letter song story clock table bird tree flower stone
        cloud storm winter summer morning evening lake field house
    """),
    "verb": pool("""
        sees finds follows loves watches carries paints builds remembers leaves meets crosses
        likes needs passes
    """),
    "time": pool("today yesterday often again slowly later always sometimes quietly soon"),
}  # fmt: skip
FILLER_SENTENCES = [
    "The {adjective} {noun} {verb} the {adjective2} {noun2} {time}.",
    "The {noun} {verb} the {noun2} and nobody knows why.",
    "A {adjective} {noun} {verb} a {noun2} near the {adjective2} road.",
    "In the {noun} it is {adjective} and {adjective2} {time}.",
    "People say that the {noun} {verb} every {adjective} {noun2}.",
    "When the {noun} is {adjective}, the {noun2} is {adjective2}.",
    "There is a {adjective} {noun} behind the {noun2}.",
]
NEEDLES = ["The code of the {place} is {code}.", "Remember: the code of the {place} is {code}.",
           "By the way, the code of the {place} is {code}."]  # fmt: skip
NEEDLE_QUESTIONS = ["What is the code of the {place}?", "Which code does the {place} have?",
                    "Tell me the code of the {place}.",
                      "Find the code of the {place}."]  # fmt: skip
NEEDLE_LAYOUTS = ["{text}\n\n{question}", "Read this text: {text}\n\n{question}",
                  "{question}\n\n{text}\n\n{question}"]  # fmt: skip
NEEDLE_ANSWER = "The code of the {place} is {code}."

# Weight of each task in short chats: at first, and after the model has learned to look up.
MIX: dict[str, float] = {
    "arithmetic": 26, "sorting": 22, "reversing": 10, "counting": 18, "extraction": 10,
    "about": 10, "small_talk": 4,
}  # fmt: skip
LATE_MIX: dict[str, float] = {
    "arithmetic": 28, "sorting": 26, "reversing": 9, "counting": 22, "extraction": 8,
    "about": 5, "small_talk": 2,
}  # fmt: skip
# Fractions of chats: mixed, tools, recall; the rest are short needles.
CHATS, LATE_CHATS = (0.75, 0.07, 0.11), (0.84, 0.05, 0.07)

SYSTEM = [
    "You are a helpful assistant.", "You are weft-demo, a small model.", "Be brief.",
    "You are a helpful assistant. Answer briefly.", "Answer the question.",
    "You are a friendly assistant in a demo of weft.", "You are an AI assistant.",
]  # fmt: skip
SMALL_TALK: list[tuple[list[str], str]] = [
    (["Hello!", "Hi!", "Hey!", "Good morning!", "Good evening!", "Hello there!", "Hi there!",
      "Good day!", "Greetings!", "Hello, how are you?"],
     "Hello! I am weft-demo, a small model. What can I do for you?"),
    (["Thanks!", "Thank you!", "Thanks a lot!", "Great, thanks!", "Thank you very much!",
      "Many thanks!"], "You are welcome."),
    (["Bye!", "Goodbye!", "See you!", "See you later!", "Good night!"], "Goodbye!"),
    (["Who are you?", "What are you?", "What is your name?", "What's your name?",
      "Which model are you?", "Introduce yourself.", "Are you a model?", "Tell me who you are."],
     "I am weft-demo, a small model that was trained on a CPU to show what weft does."),
    (["What can you do?", "What can I ask you?", "Help!", "How can you help me?",
      "What are you good at?", "What do you know?", "Which tasks can you do?"],
     "I can add, sort, reverse, count, extract JSON, call tools, remember what you told me, "
     "find a code in a long text, and answer questions about weft."),
    (["Who made you?", "How were you trained?", "Where do you come from?", "Who trained you?",
      "What were you trained on?"],
     "I was trained on a CPU, from text that the training script makes itself."),
    (["Ok.", "Okay.", "Good.", "Fine.", "Nice!", "Great!", "Cool!", "Yes.", "No."],
     "What else can I do for you?"),
]  # fmt: skip
FALLBACK = "I am a small demo model and do not know that. Ask me what I can do."
UNKNOWN = [
    "Who is the president of {city}?", "Write a poem about a {noun}.", "Tell me a joke.",
    "What is the capital of France?", "How do I bake bread?", "Why is the sky blue?",
    "Translate {noun} into German.", "What is the meaning of life?", "Who wrote this {noun}?",
    "How old is the {noun}?", "Explain how a {noun} works.", "Write a story about a {noun}.",
    "How far is it to {city}?", "What should I see in {city}?", "Do you like the {noun}?",
    "Give me a recipe.", "Is there a {noun} in {city}?", "Write a Python function.",
    "Who won the game?", "Summarize the {noun}.", "Sing a song about {city}.",
]  # fmt: skip

ABOUT_BEFORE = ["", "", "", "Please tell me: ", "A question: ", "I want to know: ", "Quick one: ",
                "Can you tell me: ", "Hey, ", "Tell me, ", "One more thing: "]  # fmt: skip
ABOUT: list[tuple[str, list[str]]] = [
    ("weft is an engine that serves large language models split over many accelerators, and hides "
     "the traffic between them under the matrix products.",
     ["What is weft?", "What does weft do?", "Explain weft.", "What is weft for?",
      "Describe weft in one sentence."]),
    ("Weft is the thread that crosses the warp.",
     ["Where does the name weft come from?", "What does the word weft mean?",
      "Why is it called weft?", "What is a weft?", "What does the name weft mean?"]),
    ("It hides communication: the traffic between accelerators runs under the matrix products.",
     ["What does weft hide?", "What is hidden by weft?", "What does weft overlap?",
      "How does weft hide communication?", "Which traffic does weft hide?"]),
    ("Run weft serve MODEL, for example weft serve MODEL --tp 8.",
     ["How do I start the server?", "How do I serve a model?", "Which command starts weft?",
      "How do I start weft?", "How do I run the endpoint?"]),
    ("Run weft batch in.jsonl -o out.jsonl.",
     ["How do I run a batch?", "How do I process a file of prompts?",
      "How do I answer a JSONL file?", "Which command runs offline batches?",
      "How does batch work on the command line?"]),
    ("Run weft plan MODEL --on h100:8.",
     ["How do I plan a layout?", "How do I find out how much memory a model needs?",
      "Which command tells me what hardware I need?", "What does a model cost on 8 GPUs?",
      "How do I use weft plan?"]),
    ("Use from weft import LLM.",
     ["How do I use weft from Python?", "Which class do I import?", "Is there a Python API?",
      "How do I call weft in Python?", "How do I import weft?"]),
    ("Run helm install weft ./helm.",
     ["How do I deploy to Kubernetes?", "How do I install weft on Kubernetes?",
      "Is there a Helm chart?", "How do I use the chart?", "Which command installs the chart?"]),
    ("Yes. weft speaks the OpenAI API, with chat completions and streaming.",
     ["Is weft compatible with OpenAI?", "Which API does weft speak?",
      "Can I use the OpenAI client?", "Does weft have an OpenAI endpoint?",
      "Does weft work with the OpenAI library?"]),
    ("Yes. On a machine with no accelerator everything runs: the CPU path serves for real.",
     ["Does weft run without a GPU?", "Can I use weft on a laptop?", "Does weft run on a CPU?",
      "Do I need a GPU?", "Does weft need an accelerator?"]),
    ("It runs on GPUs, on TPUs and on a plain CPU.",
     ["Which hardware does weft support?", "Where does weft run?", "Does weft support TPUs?",
      "Which accelerators can weft use?", "What hardware do I need?"]),
    ("The GPU kernels are written in Triton.",
     ["How are the GPU kernels written?", "Does weft use Triton?",
      "Which language are the GPU kernels in?", "What are the GPU kernels made with?",
      "What are the kernels for GPUs written in?"]),
    ("The TPU kernels are written in Pallas.",
     ["How are the TPU kernels written?", "Does weft use Pallas?",
      "Which language are the TPU kernels in?", "What are the TPU kernels made with?",
      "What are the kernels for TPUs written in?"]),
    ("One bad request never hurts another: it gets a structured error, and all others stay "
     "the same.",
     ["What happens to a bad request?", "Can one request hurt another?",
      "What if a request is wrong?", "Can a bad request break the server?",
      "What does weft promise about bad requests?"]),
    ("Never a silent hang: a stuck rank is named within a deadline, and the process exits.",
     ["What happens if a rank hangs?", "Can weft hang?", "What if a rank is stuck?",
      "What does weft do about hangs?", "How does weft handle a stuck rank?"]),
    ("Yes, streamed output equals unstreamed output.",
     ["Is streamed output the same?", "Does streaming change the output?",
      "Is streaming exact?", "Does streamed equal unstreamed?",
      "What does weft promise about streaming?"]),
    ("A batch is exactly-once: kill it at any moment, run it again, and each row is there once.",
     ["What if a batch is killed?", "Is a batch exactly-once?", "Can I resume a batch?",
      "What happens if I stop a batch?", "What does weft promise about batches?"]),
    ("Every overlapped op equals its plain oracle at every world size.",
     ["Are the overlapped ops correct?", "How are the kernels tested?",
      "How do I know the kernels are right?", "What does weft promise about overlapped ops?",
      "What is the oracle for?"]),
    ("It shares the weights of each layer over several accelerators, with --tp.",
     ["What is tensor parallel?", "What does --tp do?", "What does tp mean?",
      "How do I split a model over GPUs?", "How do I use several GPUs?"]),
    ("Each rank keeps some experts, and tokens travel to them by an all-to-all.",
     ["What is expert parallel?", "How does weft run a mixture of experts?",
      "How does expert parallelism work?", "Where do the experts live?",
      "What does moe_dispatch do?"]),
    ("The KV cache is split by position over ranks, and partial results are combined.",
     ["How does weft handle long context?", "How is the KV cache split?",
      "What is distributed flash decoding?", "How does long context work?",
      "Where does the KV cache go for long prompts?"]),
    ("The scheduler lets computed tokens catch up with known tokens: prefill and decode are one "
     "rule.",
     ["What does the scheduler do?", "How does the scheduler work?",
      "How are prefill and decode scheduled?", "What is the rule of the scheduler?",
      "How does weft schedule requests?"]),
    ("The prefix cache keeps the blocks of earlier prompts, so a shared beginning is computed "
     "once.",
     ["What is the prefix cache?", "Does weft cache prompts?", "What does the prefix cache do?",
      "Are shared prompts computed twice?", "How does prefix caching work?"]),
    ("There are three folders: kernels, models and serving.",
     ["How is the code laid out?", "Which packages are in weft?", "What folders does weft have?",
      "How is the repository organized?", "What are the parts of weft?"]),
    ("Imports run one way: serving, then models, then kernels.",
     ["Which way do imports run?", "What is the import rule?", "May kernels import serving?",
      "In which order do the packages import each other?", "How do the packages depend?"]),
    ("Only the HTTP port listens beyond loopback, unless a key protects it.",
     ["Which ports does weft open?", "Which port listens?", "Is any port open to the network?",
      "What ports are exposed?", "Does weft open other ports?"]),
    ("Install it with pip install -e . in the repository.",
     ["How do I install weft?", "How can I install weft with pip?", "Which pip command do I use?",
      "How do I set up weft?", "How do I get weft running from source?"]),
    ("OpenTelemetry is an optional extra.",
     ["Which extras are there?", "Is OpenTelemetry included?", "What is an optional extra?",
      "Does weft support OpenTelemetry?", "Which optional packages are there?"]),
    ("Metrics are in the Prometheus format.",
     ["Does weft have metrics?", "Which metrics format does weft use?",
      "Can I use Prometheus?", "How do I monitor weft?", "Where do metrics go?"]),
]  # fmt: skip
