"""``python -m gdn_aot`` is the command ``gdn-aot``."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="gdn-aot")
