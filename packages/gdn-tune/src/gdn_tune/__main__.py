"""``python -m gdn_tune`` is the command ``gdn-tune``."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="gdn-tune")
