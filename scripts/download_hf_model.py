"""Downloads a model of the Hugging Face hub into a folder that model_name= and TINKER_DEBATE_BASE_MODEL take.

    python3 scripts/download_hf_model.py --repo-id Qwen/Qwen3-4B-Instruct-2507

writes models/Qwen__Qwen3-4B-Instruct-2507. Recipes take the hub's name as well, and download it when they first need it.
"""

import argparse
import sys
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from tinker_cookbook.backends import check_command


def download(repo_id: str, revision: str | None, output: Path) -> Path:
    """Fetch a model's files into `output`. Raises OSError or ValueError, saying what is wrong."""
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, local_dir=output))
    except HFValidationError as error:
        raise ValueError(f"--repo-id {repo_id!r} is no name of the hub: give ORGANISATION/NAME") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        why = str(error).strip().splitlines()[0]
        raise OSError(
            f"{repo_id} cannot be downloaded ({why}); check the name and the network, or copy the folder from elsewhere"
        ) from error


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repo-id", required=True, help="such as Qwen/Qwen3-4B-Instruct-2507")
    parser.add_argument("--revision", help="branch, tag or commit; default: main")
    parser.add_argument("--output-dir", type=Path, help="default: models/ORGANISATION__NAME")
    given = parser.parse_args(arguments)
    check_command()
    output = given.output_dir or Path("models", given.repo_id.replace("/", "__"))
    try:
        folder = download(given.repo_id, given.revision, output)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f'{folder}\nexport TINKER_DEBATE_BASE_MODEL="{folder.resolve()}"')


if __name__ == "__main__":
    main()
