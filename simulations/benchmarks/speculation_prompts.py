"""The prompts of the speculative-decoding benchmark: five domains, written for it, in no drafter's training text.

``copy`` asks for texts that repeat most of the prompt (edits, extraction, quoting): where lookup drafts shine.
``multilingual`` is not English: where a drafter trained on English has little to offer.
"""

from __future__ import annotations

from collections.abc import Mapping

_MINUTES = """Minutes of the harbour board, Tuesday. Present: Ms Okafor (chair), Mr Lindqvist, Ms Tanaka, Mr Duarte. \
The chair opened the meeting at nine. Mr Lindqvist reported that the north pier was closed for repairs until the end \
of the month and that two cranes had failed their inspection. Ms Tanaka asked for the inspection reports to be sent \
to all members before Friday. Mr Duarte proposed to move the ferry landing to the south pier while the work lasts. \
The board agreed. The chair closed the meeting at ten past ten."""

_FUNCTION = """def read_readings(path, unit="celsius"):
    readings = []
    with open(path) as file:
        for line in file:
            name, value = line.strip().split(",")
            number = float(value)
            if unit == "fahrenheit":
                number = (number - 32) * 5 / 9
            readings.append((name, number))
    return readings
"""

_TABLE = """name: Anna Berg, town: Oslo, age: 31
name: Luis Prado, town: Lima, age: 45
name: Mei Chen, town: Taipei, age: 28
name: Omar Said, town: Cairo, age: 52
name: Ivana Horvat, town: Split, age: 39
name: Paul Martin, town: Lyon, age: 64"""

_RECIPE = """Wash the lentils and drain them. Cut the onion and the carrots into small pieces. Warm two spoons of oil \
in a pot and fry the onion until it is soft. Add the carrots and the lentils and stir for two minutes. Pour in one \
litre of water, add salt and a bay leaf, and let it cook on a low flame for twenty-five minutes. Taste it, add \
vinegar, and serve it with bread."""

DOMAINS: Mapping[str, tuple[str, ...]] = {
    "question": (
        "Why does ice float on water?",
        "What is the difference between a violin and a viola?",
        "How does a lighthouse help ships at night?",
        "What should I do if a tyre bursts on the motorway?",
        "Why do leaves change colour in autumn?",
        "How does a bicycle stay upright while it moves?",
    ),
    "prose": (
        "Write a short story about a clockmaker who finds a letter inside an old clock.",
        "Describe a market in a small town on a rainy morning.",
        "Write a letter from a sailor to his sister after a year at sea.",
        "Write an essay about the value of silence.",
        "Tell the tale of two neighbours who share one apple tree.",
        "Describe a walk through a forest after the first snow.",
    ),
    "code": (
        "Write a Python function that merges two sorted lists into one sorted list.",
        "Write a Python class for a bank account with deposit, withdraw and a history of transactions.",
        "Write a Python function that counts how often each word appears in a text file.",
        "Write a SQL query that lists customers with more than three orders in the last year, and explain it.",
        "Write a Python program that prints the first twenty prime numbers.",
        "Write a JavaScript function that validates an e-mail address and show how to call it.",
    ),
    "copy": (
        f"Repeat the following text word for word, but write 'Wednesday' for 'Tuesday':\n\n{_MINUTES}",
        f"Here is a function:\n\n```python\n{_FUNCTION}```\n\nWrite the same function with a docstring added.",
        f"Write these lines again, in the same format, with every age raised by one:\n\n{_TABLE}",
        f"Copy this recipe exactly, with 'chickpeas' in place of 'lentils':\n\n{_RECIPE}",
        f"Quote the parts of this text that speak of the piers, word for word:\n\n{_MINUTES}",
        f"Here is a function:\n\n```python\n{_FUNCTION}```\n\nRename the variable 'number' to 'degrees' and print "
        "the whole function again.",
    ),
    "multilingual": (
        "Erzähle eine kurze Geschichte über einen Fuchs und einen Raben.",
        "Explique en français comment on fait du pain.",
        "Describe en español una ciudad junto al mar.",
        "Scrivi una breve lettera a un amico che vive lontano.",
        "Leg in het Nederlands uit waarom de zee zout is.",
        "Opowiedz po polsku o zimie w górach.",
    ),
}
"""Prompts by domain; each is one user message."""
