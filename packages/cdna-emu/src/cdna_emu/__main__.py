"""``python -m cdna_emu``: the command ``cdna-emu``."""

from cdna_emu.cli import app

if __name__ == "__main__":
    app(prog_name="cdna-emu")
