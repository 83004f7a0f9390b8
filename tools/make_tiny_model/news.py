"""Invented local news: a template grammar that writes an article, its highlights and other people's summaries of it.

An article is a list of facts. The first is the event itself, the others are details that a summary may name or leave
out. Summaries of one article therefore differ in length and in what they mention, and so do their ROUGE scores.
"""

import dataclasses
import random

from tools.make_tiny_model.news_kinds import KINDS, SLOTS, Kind

FILLERS = (
    "Many people in {town} were pleased when they heard the news.",
    "Neighbours talked about little else for the rest of the week.",
    "Visitors came from nearby villages to have a look.",
    "The weather stayed mild for most of the day.",
    "A local paper printed several pictures of the scene.",
    "More news is expected later this month.",
    "Some people asked for more parking in the area.",
    "The mayor of {town} thanked everyone who had helped.",
    "Children from the school waved small paper flags.",
    "Older people in {town} said they could remember nothing like it.",
)


@dataclasses.dataclass(frozen=True)
class Article:
    """An article with, for each fact, the sentences that a summary may use for it."""

    text: str
    town: str
    labels: tuple[str, ...]  # what each detail is about, e.g. "the cost"
    event: tuple[str, ...]
    details: tuple[tuple[str, ...], ...]

    @property
    def highlights(self) -> str:
        """The reference summary: the event, then the first detail."""
        return f"{self.event[0]} {self.details[0][0]}"


@dataclasses.dataclass(frozen=True)
class Summary:
    text: str
    details: frozenset[int]  # indices into Article.details of the details that it names

    @property
    def worth(self) -> int:
        """Its quality to a judge: the first detail is the one that the highlights name."""
        return 2 * (0 in self.details) + len(self.details)


def fill_slots(kind: Kind, rng: random.Random) -> dict[str, str]:
    values = {name: rng.choice(options) for name, options in (SLOTS | dict(kind.choices)).items()}
    values["town2"] = rng.choice([town for town in SLOTS["town"] if town != values["town"]])
    values["person"] = f"{values['first']} {values['last']}"
    values["amount"] = f"{rng.randint(2, 98)},000"
    values["count"] = str(rng.randint(2, 9) * rng.choice((10, 100)))
    values["n"] = str(rng.randint(2, 9))
    return values


def write_article(rng: random.Random) -> Article:
    kind = rng.choice(KINDS)
    values = fill_slots(kind, rng)

    def said(sentences: tuple[str, ...]) -> tuple[str, ...]:
        filled = (s.format(**values) for s in sentences)
        return tuple(s[0].upper() + s[1:] for s in filled)

    body = [rng.choice(said(kind.event.article))]
    body += [rng.choice(said(detail.article)) for detail in kind.details]
    fillers = [f.format(**values) for f in rng.sample(FILLERS, rng.randint(3, 5))]
    body.insert(2, fillers[0])
    body += fillers[1:]
    return Article(
        text=" ".join(body),
        town=values["town"],
        labels=tuple(d.label for d in kind.details),
        event=said(kind.event.summary),
        details=tuple(said(d.summary) for d in kind.details),
    )


def write_summary(article: Article, rng: random.Random) -> Summary:
    """One writer's summary: the event in some wording, and none, one or two of the details."""
    event = article.event[0] if rng.random() < 0.6 else rng.choice(article.event)
    chosen: list[int] = []
    luck = rng.random()
    if luck < 0.50:
        chosen = [0]
    elif luck < 0.75:
        chosen = [rng.randrange(1, len(article.details))]
    sentences = [event]
    for i in chosen:
        options = article.details[i]
        sentences.append(options[0] if rng.random() < 0.6 else rng.choice(options))
    return Summary(" ".join(sentences), frozenset(chosen))
