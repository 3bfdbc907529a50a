"""The client's own commands: each reads its arguments, asks a server and shows the answer."""
