"""Questions about pictures of shapes, which Pillow draws on the spot: colours, names, numbers, and whether something is there.

A picture is drawn from its group's seed, so a run resumes without replaying anything, and no picture of a test is one of
training: places and sizes are drawn too.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.env.dataset import DatasetSettings, Environment, Groups, Place
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.image_processing_utils import new_picture
from tinker_cookbook.renderers import ImagePart, Message, Renderer, TextPart
from tinker_cookbook.rl.problem_env import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.types import Metrics

if TYPE_CHECKING:
    from PIL.Image import Image

SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (205, 45, 45),
    "green": (40, 150, 60),
    "blue": (45, 80, 205),
    "yellow": (235, 200, 40),
    "purple": (140, 60, 170),
    "orange": (240, 130, 30),
}
NUMBERS = ("no", "one", "two", "three")
SIDE = 48
"""Pixels of a picture's side; three by three cells of 16, of which each holds at most one shape."""
_CELL = 16


@dataclass(frozen=True)
class Thing:
    """A shape in a picture; `left`, `top` and `size` in pixels."""

    shape: str
    colour: str
    left: int
    top: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    things: tuple[Thing, ...]
    background: tuple[int, int, int]

    @classmethod
    def drawn(cls, rng: random.Random, count: int) -> "Scene":
        """`count` shapes, one to three, that do not overlap."""
        things = []
        for cell in rng.sample(range(9), count):
            size = rng.randint(11, _CELL - 1)
            left, top = (_CELL * at + rng.randint(0, _CELL - size) for at in (cell % 3, cell // 3))
            things.append(Thing(rng.choice(SHAPES), rng.choice([*COLOURS]), left, top, size))
        grey = rng.randint(225, 255)
        return cls(tuple(things), (grey, grey, grey))

    def picture(self) -> "Image":
        """SIDE x SIDE pixels, RGB."""
        image, draw = new_picture((SIDE, SIDE), self.background)
        for thing in self.things:
            box = (thing.left, thing.top, thing.left + thing.size - 1, thing.top + thing.size - 1)
            left, top, right, bottom = box
            colour = COLOURS[thing.colour]
            if thing.shape == "circle":
                draw.ellipse(box, fill=colour)
            elif thing.shape == "square":
                draw.rectangle(box, fill=colour)
            else:
                draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)
        return image

    def question(self, rng: random.Random) -> tuple[str, str]:
        """A question with one right answer, which is a word, and that answer."""
        shapes, colours = (Counter(getattr(thing, key) for thing in self.things) for key in ("shape", "colour"))
        choices = [("How many shapes are there?", NUMBERS[len(self.things)])]
        for thing in self.things:
            if shapes[thing.shape] == 1:
                choices.append((f"What colour is the {thing.shape}?", thing.colour))
            if colours[thing.colour] == 1:
                choices.append((f"Which shape is {thing.colour}?", thing.shape))
        there = rng.choice(self.things) if rng.random() < 0.5 else None
        shape = there.shape if there else rng.choice(SHAPES)
        colour = there.colour if there else rng.choice([*COLOURS])
        is_there = any((thing.shape, thing.colour) == (shape, colour) for thing in self.things)
        choices.append((f"Is there a {colour} {shape}?", "yes" if is_there else "no"))
        return rng.choice(choices)


def messages_about(scene: Scene, question: str) -> list[Message]:
    """The picture and the question, as one message of the user."""
    parts: list[ImagePart | TextPart] = [
        {"type": "image", "image": scene.picture()},
        {"type": "text", "text": question},
    ]
    return [{"role": "user", "content": [*parts]}]


def is_answer(text: str, answer: str) -> bool:
    """Whether the reply is the answer's word and nothing else, whatever its case and with or without a full stop."""
    return re.sub(r"[^\w]", "", text).lower() == answer


class ShapesEnv(OneTurnEnv):
    """One picture and one question, answered with one word."""

    def __init__(self, scene: Scene, question: str, answer: str, instruction: str, renderer: Renderer):
        super().__init__(renderer)
        self.scene, self.question, self.answer, self.instruction = scene, question, answer, instruction

    def get_messages(self) -> list[Message]:
        return messages_about(self.scene, f"{self.question} {self.instruction}".strip())

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        right = float(is_answer(reply.text, self.answer))
        return right, {"correct": right, "format": float(reply.is_clean)}

    def get_reference_answer(self) -> str:
        return self.answer


@chz.chz(typecheck=True)
class Shapes(Environment):
    """Questions about drawn shapes."""

    most_shapes: int = chz.field(default=3, doc="shapes in a picture, at most: 1 to 3")
    instruction: str = chz.field(
        default="", doc="put after each question, 'Answer with one word.' for example; empty: nothing"
    )

    @chz.validate
    def _check(self) -> None:
        if not 1 <= self.most_shapes <= 3:
            raise ConfigurationError(f"env.most_shapes={self.most_shapes}: must be 1 to 3")

    def check(self, settings: DatasetSettings) -> None:
        renderer = settings.renderer()
        if not renderer.reads_images:
            raise ConfigurationError(
                f"renderer_name={settings.renderer_name!r} reads text only; this environment shows pictures and needs the "
                "renderer of a model that sees, qwen3_vl_instruct for example"
            )

    async def groups(self, settings: DatasetSettings) -> Groups:
        renderer = settings.renderer()

        def make(number: int, attempts: int, place: Place) -> OneTurnGroupBuilder:
            rng = random.Random(place.seed)
            scene = Scene.drawn(rng, rng.randint(1, self.most_shapes))
            question, answer = scene.question(rng)
            env = partial(ShapesEnv, scene, question, answer, self.instruction, renderer)
            return OneTurnGroupBuilder(env, attempts, "shapes")

        return Groups(make)
