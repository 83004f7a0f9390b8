"""Public recipes of tinker-cookbook, unmodified, on this library and the local engine: each trains and saves.

`make test-ecosystem` runs them; the package comes from the index and is thrown away afterwards.
"""

from pathlib import Path

import pytest

from tests.ecosystem.package import VERSIONS, IndexUnreachableError, unpack_recipes
from tests.ecosystem.running import make_model, run_recipe
from tests.ecosystem.table import RECIPES, PublicRecipe

pytestmark = pytest.mark.ecosystem


@pytest.fixture(scope="module", params=VERSIONS)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return unpack_recipes(tmp_path_factory.mktemp("package"), request.param)
    except IndexUnreachableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder / "taught", package, folder)
    return folder / "taught"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_public_recipe_trains_and_saves(recipe: PublicRecipe, package: Path, model: Path, tmp_path: Path) -> None:
    outcome = run_recipe(recipe, package, model, tmp_path)
    assert outcome.problem == "", (tmp_path / "output.txt").read_text()[-3000:]
