"""Write train_trl/data/optical_digits.npz from the optical digits that scikit-learn ships (needs scikit-learn)."""

from pathlib import Path

import numpy as np


OUT = Path(__file__).resolve().parent.parent / "train_trl" / "data" / "optical_digits.npz"


def main() -> None:
    """Write the file and say how large it is."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUT, images=digits.images.astype(np.uint8), labels=digits.target.astype(np.uint8))
    print(f"{len(digits.target)} digits, {OUT.stat().st_size} bytes: {OUT.name}")


if __name__ == "__main__":
    main()
