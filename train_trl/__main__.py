"""`python -m normalign.train_trl RECIPE.yaml [--check] [--key value ...]`, for `accelerate launch -m normalign.train_trl`."""

import sys

from ..configuration.errors import NormalignError, quiet_optional_packages
from . import RecipeError, check, parse_overrides, train
from .processes import is_first


def main(arguments: list[str]) -> int:
    """Runs the recipe, or looks at its rows; 0 done, 1 failed or bad rows, 2 wrong usage, 130 interrupted, 143 SIGTERM."""
    quiet_optional_packages()
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write(f"{__doc__}\n")
        return 0 if arguments else 2
    changes = [argument for argument in arguments[1:] if argument != "--check"]
    try:
        if len(changes) < len(arguments) - 1:
            report = check(arguments[0], parse_overrides(changes))
            report.show()
            return 1 if report.bad else 0
        train(arguments[0], parse_overrides(changes))
    except NormalignError as error:
        if is_first() or not getattr(error, "shared", False):
            sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, RecipeError) else getattr(error, "exit_status", 1)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; what was being written is not finished. Run the command again.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
