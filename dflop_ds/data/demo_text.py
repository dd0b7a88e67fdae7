"""Plain sentences from a small grammar, for the demo data set."""

from __future__ import annotations

import math

import numpy as np

_THINGS = (
    "roof", "petal", "wooden gate", "stone wall", "blue sky", "narrow path", "old temple", "green leaf",
    "bright window", "tall column", "garden", "quiet courtyard", "painted beam", "dark tile", "thin stem",
    "morning light", "deep shadow", "row of lanterns", "small bridge", "yellow flower",
)  # fmt: skip
_DEEDS = (
    "leads to",
    "stands behind",
    "covers",
    "faces",
    "frames",
    "hides",
    "touches",
    "rises above",
    "belongs to",
)
_QUALITIES = ("soft", "sharp", "warm", "pale", "heavy", "plain", "distant", "delicate", "weathered", "vivid")
_PLACES = (
    "near the middle",
    "on the left",
    "on the right",
    "at the top",
    "in the background",
    "along the edge",
)
_COMMENTS = (
    "It looks {quality} {place}.",
    "The {thing} {deed} the {other}.",
    "One can see a {quality} {thing} {place}.",
    "{place_first}, the {thing} {deed} a {quality} {other}.",
    "Nothing else is as {quality} as the {thing}.",
    "Between the {thing} and the {other} there is room for {count} people.",
)
_QUESTIONS = (
    "What does the {subject} show?",
    "Describe the {subject} in your own words.",
    "Where is the {thing} in the {subject}?",
    "Which part of the {subject} looks {quality}?",
    "Count the {thing}s in the {subject}.",
)
_SHORT_ANSWERS = ("Yes.", "No.", "Two.", "A {thing}.", "{place_first}.", "The {thing}.")
_LONGEST_ANSWER_WORDS = 150


def sentence(
    rng: np.random.Generator, templates: tuple[str, ...] = _COMMENTS, subject: str = "picture"
) -> str:
    """Fill one template at random."""

    def pick(words: tuple[str, ...]) -> str:
        return words[int(rng.integers(len(words)))]

    place = pick(_PLACES)
    return pick(templates).format(
        subject=subject,
        thing=pick(_THINGS),
        other=pick(_THINGS),
        deed=pick(_DEEDS),
        quality=pick(_QUALITIES),
        place=place,
        place_first=place.capitalize(),
        count=int(rng.integers(2, 100)),
    )


def paragraph(rng: np.random.Generator, num_words: int) -> str:
    """Sentences of ``num_words`` words in all, the last one cut short when need be."""
    words: list[str] = []
    while len(words) < num_words:
        words += sentence(rng).split()
    return " ".join(words[:num_words])


def question_text(rng: np.random.Generator, subject: str) -> str:
    """A question about a picture, pictures or a clip."""
    return sentence(rng, _QUESTIONS, subject)


def answer_text(rng: np.random.Generator) -> str:
    """An answer of 1 to about 150 words, short ones more often."""
    if rng.random() < 0.3:
        return sentence(rng, _SHORT_ANSWERS)
    return paragraph(rng, round(math.exp(math.log(_LONGEST_ANSWER_WORDS) * rng.random())))


def chat_text(rng: np.random.Generator, num_words: int) -> tuple[str, str]:
    """Question and answer of ``num_words`` words together, divided at random."""
    num_question_words = max(1, round(num_words * rng.uniform(0.1, 0.6)))
    return paragraph(rng, num_question_words), paragraph(rng, max(1, num_words - num_question_words))
