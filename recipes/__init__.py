"""The commands, one module each."""

import tinker_cookbook

if not hasattr(tinker_cookbook, "__upstream__"):
    # `name` makes `python -m recipes.NAME` print the sentence alone, without where it was raised.
    raise ImportError(
        f"{tinker_cookbook.__path__[0]} holds the files of the distribution tinker-cookbook, where this project's should be; "
        "run `pip uninstall tinker-cookbook`, then install this project again, or give it an environment of its own",
        name=__name__,
    )
