"""`python -m mist_megatron` is the `mist-megatron` command."""

from mist_megatron.cli.app import main

if __name__ == "__main__":
    main()
