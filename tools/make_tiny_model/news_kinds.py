"""The word bank of the invented news: ten kinds of event, their details, and the names that fill the slots."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Fact:
    """One fact: wordings for an article, wordings for a summary, and its subject."""

    article: tuple[str, ...]
    summary: tuple[str, ...]
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of event. `choices` are its own slot values; the other slots come from SLOTS."""

    choices: Mapping[str, tuple[str, ...]]
    event: Fact
    details: tuple[Fact, ...]


SLOTS: dict[str, tuple[str, ...]] = {
    "town": (
        "Marlow Bay", "Oakhurst", "Pinefield", "Stonebrook", "Elmsby", "Harrowgate", "Westmere", "Coldwater", "Fernley",
        "Brightwell", "Ashcombe", "Greyport", "Larkhill", "Millbridge", "Northam", "Redcliff", "Saltmarsh", "Thornby",
        "Underhill", "Willowdale",
    ),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "month": ("January", "March", "April", "May", "June", "July", "September", "October", "November"),
    "first": (
        "Anna", "Ben", "Clara", "David", "Ella", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Kate", "Leo", "Mara",
        "Nora", "Oscar", "Paula", "Rosa", "Sam", "Tess", "Victor",
    ),
    "last": (
        "Abbot", "Baker", "Carver", "Dale", "Ember", "Frost", "Gray", "Holt", "Irving", "Jarvis", "Keller", "Lund",
        "Moss", "North", "Parry", "Quill", "Reed", "Stone", "Turner", "Vale",
    ),
    "job": ("teacher", "baker", "nurse", "farmer", "driver", "gardener", "painter", "carpenter"),
}  # fmt: skip

KINDS = (
    Kind(
        choices={
            "place": (
                "library",
                "swimming pool",
                "market hall",
                "playground",
                "bicycle shop",
                "health centre",
                "theatre",
            ),
            "street": ("Mill Street", "Station Road", "Church Lane", "Park Avenue", "River Walk"),
        },
        event=Fact(
            ("A new {place} opened in {town} on {day}.", "On {day} the doors of a new {place} opened in {town}."),
            ("A new {place} has opened in {town}.", "{town} has a new {place}.", "A {place} opened on {day}."),
        ),
        details=(
            Fact(
                ("The building on {street} cost {amount} pounds.", "It stands on {street} and cost {amount} pounds."),
                ("It cost {amount} pounds.", "The building cost {amount} pounds."),
                "the cost",
            ),
            Fact(
                ("The first visitor was {person}, who had waited since early morning.",),
                ("{person} was the first visitor.", "The first to enter was {person}."),
                "the first visitor",
            ),
            Fact(
                ("It will be open {n} days a week, and entry is free.",),
                ("It is open {n} days a week.",),
                "the opening days",
            ),
        ),
    ),
    Kind(
        choices={
            "thing": ("church roof", "old bridge", "harbour wall", "school hall", "town clock", "bus station"),
            "hour": ("midnight", "dawn", "noon", "sunset"),
        },
        event=Fact(
            ("A storm damaged the {thing} in {town} on {day}.", "On {day} a storm hit {town} and damaged the {thing}."),
            (
                "A storm damaged the {thing} in {town}.",
                "The {thing} in {town} was damaged.",
                "A storm hit {town} on {day}.",
            ),
        ),
        details=(
            Fact(
                (
                    "Repairs will take {n} weeks, the council said.",
                    "The council said that repairs will take {n} weeks.",
                ),
                ("Repairs will take {n} weeks.", "It takes {n} weeks to repair."),
                "the repairs",
            ),
            Fact(
                ("Nobody was hurt, but {count} homes lost power.", "The power failed in {count} homes."),
                ("{count} homes lost power.", "The power failed in {count} homes."),
                "the power cut",
            ),
            Fact(
                ("The wind was strongest at {hour}, said {person}, who lives close by.",),
                ("The wind was strongest at {hour}.",),
                "the hour",
            ),
        ),
    ),
    Kind(
        choices={"theme": ("apple", "kite", "music", "bread", "lantern", "boat", "flower", "cheese")},
        event=Fact(
            (
                "About {count} people came to the {theme} festival in {town} on {day}.",
                "The {theme} festival in {town} drew about {count} people on {day}.",
            ),
            (
                "{count} people came to the {theme} festival in {town}.",
                "The {theme} festival drew {count} people.",
                "{town} held its {theme} festival on {day}.",
            ),
        ),
        details=(
            Fact(
                ("The first prize went to {person} from the next valley.", "Judges gave the first prize to {person}."),
                ("{person} won the first prize.", "The first prize went to {person}."),
                "the winner",
            ),
            Fact(
                ("The festival raised {amount} pounds for the hospital.",),
                ("It raised {amount} pounds.", "The hospital gets {amount} pounds."),
                "the money raised",
            ),
            Fact(("It is now in its year number {n}.",), ("It was held for year number {n}.",), "the year"),
        ),
    ),
    Kind(
        choices={
            "plan": (
                "plant more trees",
                "close the old mill",
                "paint the town hall",
                "build a footpath",
                "ban cars from the square",
                "repair the pier",
                "lower bus fares",
            ),
        },
        event=Fact(
            ("The council of {town} voted on {day} to {plan}.", "On {day} the council of {town} decided to {plan}."),
            ("The council of {town} voted to {plan}.", "{town} will {plan}.", "The council decided to {plan}."),
        ),
        details=(
            Fact(
                (
                    "Work will begin in {month} and cost {amount} pounds.",
                    "The work starts in {month} and costs {amount} pounds.",
                ),
                ("Work will begin in {month}.", "The work costs {amount} pounds."),
                "the start",
            ),
            Fact(
                ("Only {n} members voted against the plan.", "The plan had {n} votes against it."),
                ("{n} members voted against it.",),
                "the votes",
            ),
            Fact(
                ("The idea came from {person}, a local {job}.",), ("The idea came from {person}.",), "whose idea it was"
            ),
        ),
    ),
    Kind(
        choices={"sport": ("football", "hockey", "rugby", "chess", "tennis", "rowing")},
        event=Fact(
            (
                "{town} beat {town2} in the {sport} cup on {day}.",
                "On {day} {town} won the {sport} cup against {town2}.",
            ),
            (
                "{town} beat {town2} in the {sport} cup.",
                "{town} won the {sport} cup.",
                "{town2} lost to {town} on {day}.",
            ),
        ),
        details=(
            Fact(
                ("The best player was {person}, a {job}.", "Fans named {person} the best player."),
                ("{person} was the best player.", "The best player was {person}."),
                "the best player",
            ),
            Fact(
                ("About {count} fans watched the final.",),
                ("{count} fans watched.", "About {count} fans came."),
                "the crowd",
            ),
            Fact(
                ("The two sides will meet again in {n} weeks.",), ("They meet again in {n} weeks.",), "the next match"
            ),
        ),
    ),
    Kind(
        choices={
            "animal": ("cat", "young seal", "horse", "dog", "lost sheep", "owl"),
            "hazard": ("a frozen pond", "a deep well", "a tall chimney", "a muddy ditch", "a flooded field"),
        },
        event=Fact(
            (
                "A {animal} was rescued from {hazard} in {town} on {day}.",
                "On {day} a {animal} was saved from {hazard} in {town}.",
            ),
            (
                "A {animal} was rescued from {hazard} in {town}.",
                "A {animal} was saved in {town}.",
                "Helpers rescued a {animal}.",
            ),
        ),
        details=(
            Fact(
                ("It took {n} hours to bring the animal out.", "The work took {n} hours in all."),
                ("It took {n} hours.", "The rescue took {n} hours."),
                "the time it took",
            ),
            Fact(
                ("The alarm was raised by {person}, a {job}.",), ("{person} raised the alarm.",), "who raised the alarm"
            ),
            Fact(
                ("Food and care have cost {amount} pounds so far.",),
                ("Its care has cost {amount} pounds.",),
                "the cost",
            ),
        ),
    ),
    Kind(
        choices={
            "thing": ("weather station", "solar car", "wooden boat", "giant puzzle", "rain garden", "small windmill")
        },
        event=Fact(
            ("Pupils at the school in {town} have built a {thing}.", "A {thing} has been built by pupils in {town}."),
            ("Pupils in {town} have built a {thing}.", "A {thing} was built in {town}.", "Pupils built a {thing}."),
        ),
        details=(
            Fact(
                ("They were led by {person}, a retired {job}.", "Their guide was {person}, once a {job}."),
                ("They were led by {person}.", "{person} led the work."),
                "who led it",
            ),
            Fact(("The work took {n} months and used old parts.",), ("It took {n} months.",), "the time it took"),
            Fact(("It will be shown to the public in {month}.",), ("It will be shown in {month}.",), "the show"),
        ),
    ),
    Kind(
        choices={
            "road": ("Harbour Road", "Bridge Street", "Hill Lane", "the north road", "the ring road"),
            "cause": ("new water pipes", "a cracked bridge", "fallen rocks", "a cable fault"),
        },
        event=Fact(
            ("In {town}, {road} will be closed for {n} weeks.", "Drivers in {town} will lose {road} for {n} weeks."),
            (
                "In {town}, {road} will close for {n} weeks.",
                "{road} in {town} will close.",
                "A road in {town} will close.",
            ),
        ),
        details=(
            Fact(("The cause is {cause}.", "The reason given is {cause}."), ("The cause is {cause}.",), "the cause"),
            Fact(
                ("The work begins in {month}.", "Work starts in {month}."),
                ("The work begins in {month}.",),
                "the start",
            ),
            Fact(
                ("The closure worries {person}, a {job} who drives there each day.",),
                ("It worries {person}.", "{person} is worried."),
                "who is worried",
            ),
        ),
    ),
    Kind(
        choices={"prize": ("Silver Leaf", "Golden Spoon", "Good Neighbour", "Bright Idea", "Open Hand")},
        event=Fact(
            (
                "A {job} from {town}, {person}, has won the {prize} prize.",
                "The {prize} prize goes to {person}, a {job} from {town}.",
            ),
            (
                "{person} from {town} has won the {prize} prize.",
                "{person} won the {prize} prize.",
                "A {job} from {town} won a prize.",
            ),
        ),
        details=(
            Fact(
                ("It is worth {amount} pounds.", "The winner receives {amount} pounds."),
                ("It is worth {amount} pounds.",),
                "the sum",
            ),
            Fact(
                ("The award was handed over on {day} at the town hall.",), ("It was handed over on {day}.",), "the day"
            ),
            Fact(
                ("There were {count} other entries this year.",),
                ("There were {count} other entries.",),
                "the other entries",
            ),
        ),
    ),
    Kind(
        choices={
            "find": ("a box of old coins", "a stone statue", "a ship's bell", "a Roman road", "a hidden cellar"),
            "place": ("the car park", "the town square", "a farm field", "the old school", "the railway line"),
        },
        event=Fact(
            (
                "Workers found {find} under {place} in {town} on {day}.",
                "On {day} {find} was found under {place} in {town}.",
            ),
            (
                "Workers found {find} under {place} in {town}.",
                "Workers in {town} found {find}.",
                "{find} was found on {day}.",
            ),
        ),
        details=(
            Fact(
                ("It may be {count} years old, experts say.", "Experts say it may be {count} years old."),
                ("It may be {count} years old.",),
                "the age",
            ),
            Fact(
                ("The museum has offered {amount} pounds for it.",),
                ("The museum has offered {amount} pounds.",),
                "the offer",
            ),
            Fact(("The first to see it was {person}.",), ("{person} saw it first.",), "who saw it first"),
        ),
    ),
)
