"""Print, as JSON, the command-line flags that the installed Megatron knows.

What is printed is shipped as `megatron_flags.json`, so that `lint` can name unknown flags on machines without
Megatron. Needs megatron-core 0.17 or newer, whose package holds the argument parser.
"""

from __future__ import annotations

import argparse
import json
import sys


def main() -> None:
    import megatron.core
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    version = megatron.core.__version__.partition("+")[0]
    json.dump({"version": version, "flags": sorted(flags)}, sys.stdout, indent=0)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
