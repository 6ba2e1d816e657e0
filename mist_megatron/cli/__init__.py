"""The command line: the only room with typer, rich and logging; here the other rooms are wired together."""
