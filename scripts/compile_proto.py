"""Compile the .proto file of the gRPC service: `make proto`. With --check, fail if it is stale.

The result is a file descriptor set, from which protobuf makes the message classes at import. Unlike
generated Python code it works with every version of protobuf, and needs no build step.
"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).resolve().parents[1] / "server" / "engram_server" / "api" / "rpc"
SOURCE, COMPILED = FOLDER / "open_inference.proto", FOLDER / "open_inference.binpb"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "descriptors"
        options = [f"--proto_path={FOLDER}", f"--descriptor_set_out={written}", SOURCE.name]
        if protoc.main(["protoc", *options]) != 0:
            return 1
        compiled = written.read_bytes()
    if "--check" in sys.argv[1:]:
        if COMPILED.read_bytes() == compiled:
            return 0
        print(f"{COMPILED.name} is out of date: run `make proto`.", file=sys.stderr)  # noqa: T201
        return 1
    COMPILED.write_bytes(compiled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
