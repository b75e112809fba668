"""`python -m stable_opd_mcore` is the `stable-opd` command, for torchrun."""

from stable_opd_mcore.cli import main

if __name__ == "__main__":
    main()
