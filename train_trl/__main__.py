"""`python -m normalign.train_trl RECIPE.yaml [--key value ...]`, for `accelerate launch -m normalign.train_trl`."""

import sys

from ..configuration.errors import NormalignError
from . import RecipeError, parse_overrides, train
from .processes import is_first


def main(arguments: list[str]) -> int:
    """Runs the recipe; 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write(f"{__doc__}\n")
        return 0 if arguments else 2
    try:
        train(arguments[0], parse_overrides(arguments[1:]))
    except NormalignError as error:
        if is_first() or not getattr(error, "shared", False):
            sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, RecipeError) else 1
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; what was being written is not finished. Run the command again.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
