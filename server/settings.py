"""Every setting of the server, declared once.

Each field is read from the environment variable `ENGRAM_` + its name in capitals; what the command
line gives goes before it. Nothing is read until `load_settings` is called.
docs/reference/configuration.md lists the same settings, and a test compares the two.
"""

import difflib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    ByteSize,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from server import embedded
from server.errors import SettingsError

PREFIX = "ENGRAM_"
# Variables of the command line and the client, which servers may find in their environment too.
OTHERS = frozenset({f"{PREFIX}SERVER", f"{PREFIX}DEBUG"})

KIB, MIB, GIB = 1024, 1024**2, 1024**3

# A list in one variable: `cuda:0,cuda:1`.
CommaList = Annotated[tuple[str, ...], NoDecode]
Key = Annotated[SecretStr, Field(min_length=8)]
# None of them takes a shared secret: what checks a signature could make one too.
OIDC_ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Settings(BaseSettings):
    """What one server does and how much it may use."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    # What is served
    backbone: Text = Field(
        default_factory=lambda: str(embedded.BACKBONE),
        description="The frozen backbone: a folder, or a Hugging Face model name.",
    )
    image_size: int | None = Field(
        None, ge=16, le=4096, description="Serve the backbone at this image size, not its own."
    )
    store: Text = Field(
        ".engram/store", description="The task store: a folder, or a file, s3, gs or az URL."
    )
    pinned_tasks: CommaList = Field(
        (), description="Tasks that always stay on the device, by name."
    )
    poll_seconds: float = Field(
        1.0, gt=0, le=3600, description="How often the store is asked for changes by others."
    )
    heartbeat_seconds: float = Field(
        5.0,
        ge=0,
        le=60,
        description="How often this server says in the store that it is there; 0: never.",
    )
    bundle_cache: Text = Field(
        ".engram/bundles",
        description="Folder that keeps the bundles of a remote store for the next start.",
    )
    bundle_cache_bytes: ByteSize = Field(
        ByteSize(4 * GIB), description="Disk for that folder; 0 switches it off."
    )

    # Where it listens
    host: Text = Field(
        "127.0.0.1", description="Address to listen on. Others than loopback need a key."
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: Key | None = Field(
        None, description="A key to predict, read and scrape; to do all, where it is the only one."
    )
    admin_key: Key | None = Field(None, description="A key to do all: also to change tasks.")
    keys_file: Text | None = Field(
        None, description="File of further keys, each with its scopes: see `engram keys`."
    )
    allowed_hosts: CommaList = Field(
        (),
        description="Further names in `Host` that a server without keys answers to, by commas.",
    )
    share_contexts: bool = Field(
        False, description="Keep one cache of contexts for all keys, not one for each."
    )
    api_key_file: Text | None = Field(
        None, description="File with the API key, in place of the variable."
    )
    admin_key_file: Text | None = Field(
        None, description="File with the admin key, in place of the variable."
    )

    tls_certificate: Text | None = Field(
        None, description="Serve https with this certificate chain: a PEM file."
    )
    tls_key: Text | None = Field(
        None, description="Its private key, a PEM file. Unset: in the file of the certificate."
    )
    tls_key_password_file: Text | None = Field(
        None, description="File with the password of the key, if it has one."
    )
    tls_client_ca: Text | None = Field(
        None, description="Certificates that sign those of clients: a PEM file. Unset: not asked."
    )
    tls_client_certificates: Literal["required", "optional"] = Field(
        "required", description="With a client CA: whether a client without one may connect."
    )
    trusted_proxies: CommaList = Field(
        (), description="Proxies whose X-Forwarded-For is believed: addresses or networks."
    )

    # Tokens of an OpenID provider
    oidc_issuer: Text | None = Field(
        None, description="Whose tokens are good: the `iss` in them. Needs the extra `oidc`."
    )
    oidc_audience: Text | None = Field(
        None, description="Whom tokens must be for: the `aud` in them."
    )
    oidc_jwks: Text | None = Field(
        None, description="The provider's public keys: a file, or a URL. Read again as they change."
    )
    oidc_algorithms: CommaList = Field(
        ("RS256", "ES256"), description="Signatures that are accepted, of RS, PS, ES and EdDSA."
    )
    oidc_leeway_seconds: float = Field(
        30.0, ge=0, le=300, description="By how much the provider's clock may differ."
    )
    oidc_scope_claim: Text = Field(
        "scope", description="The claim with the scopes, such as `engram:predict:team-a/*`."
    )

    # The device
    devices: CommaList = Field(
        ("auto",),
        description="Devices, one worker each: `cuda:0,cuda:1`. `auto` is cuda:0, or else cpu.",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto",
        description="Arithmetic of the backbone. `auto`: bfloat16 on GPUs, else float32. "
        "`int8`: CPUs only.",
    )
    compile: bool = Field(False, description="Compile the pass with torch.compile: slower start.")
    torch_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads of one pass on a CPU; torch decides if unset."
    )
    resident_bytes: ByteSize | None = Field(
        None,
        description="Device memory for tasks; the least used move to the host. Unset: no limit.",
    )

    # Batching and admission
    budget_rows: int = Field(
        4096, ge=1, description="Token rows of one batch: image tokens and one per image and task."
    )
    queue_images: int = Field(
        256, ge=1, description="Images admitted and not yet answered; more are refused with 429."
    )
    decode_threads: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=1,
        le=1024,
        description="Threads that decode and resize images. Default: one per core.",
    )
    default_deadline_ms: float | None = Field(
        None, gt=0, description="Deadline of requests that bring no X-Deadline-Ms. Unset: none."
    )

    # The cache of image contexts
    cache_bytes: ByteSize = Field(
        ByteSize(GIB), description="Memory for contexts of images seen lately; 0 switches it off."
    )
    cache_precision: Literal["float16", "bfloat16", "float32"] = Field(
        "float16", description="How contexts are kept."
    )
    cache_device: Literal["host", "device"] = Field(
        "host", description="Where contexts are kept: host memory, or the device that made them."
    )

    # Limits of one request
    body_bytes: ByteSize = Field(
        ByteSize(32 * MIB), ge=KIB, description="Largest body of a prediction request."
    )
    bundle_bytes: ByteSize = Field(
        ByteSize(256 * MIB), ge=KIB, description="Largest bundle that may be uploaded."
    )
    max_pixels: int = Field(
        64_000_000, ge=1, description="Pixels of one image, told from its header."
    )
    decoded_bytes: ByteSize = Field(
        ByteSize(GIB),
        ge=MIB,
        description="Memory of all images being decoded; one that alone needs more is refused.",
    )
    max_images: int = Field(64, ge=1, description="Images in one request.")
    max_tasks: int = Field(256, ge=1, description="Tasks in one request.")

    json_values: int = Field(
        500_000, ge=1000, description="Values in the JSON of an inference below /v2."
    )
    answer_bytes: ByteSize = Field(
        ByteSize(16 * MIB), ge=KIB, description="Largest answer to a prediction, estimated before."
    )

    # Limits of connections
    connections: int = Field(2000, ge=1, description="Connections at once; more get 503.")
    connections_per_address: int = Field(
        1000, ge=1, description="Of one address, or one IPv6 network of 64 bits; more get 503."
    )
    header_bytes: ByteSize = Field(
        ByteSize(32 * KIB), ge=KIB, description="Address and headers of a request; more are 431."
    )
    header_count: int = Field(100, ge=8, description="Headers of a request; more are 431.")
    header_seconds: float = Field(
        10.0, gt=0, le=3600, description="Time for a request's header, from its first byte; 408."
    )
    body_seconds: float = Field(
        30.0, gt=0, le=3600, description="Time for a request's body, from its first byte; 408."
    )
    bundle_seconds: float = Field(
        600.0, gt=0, le=86400, description="The same where the body is a bundle."
    )
    idle_seconds: float = Field(
        30.0, gt=0, le=3600, description="How long a connection may wait for its next request."
    )
    send_seconds: float = Field(
        30.0, gt=0, le=3600, description="How long a client may leave an answer untaken."
    )
    inflight_body_bytes: ByteSize = Field(
        ByteSize(512 * MIB), ge=KIB, description="Bodies of all requests at once; more get 429."
    )
    max_validations: int = Field(
        4, ge=1, description="Bundles that are validated at once; more get 429."
    )
    max_downloads: int = Field(
        8, ge=1, description="Bundles that are downloaded at once; more get 429."
    )

    # Operations
    drain_seconds: float = Field(
        30.0, ge=0, le=3600, description="How long a shutdown waits for requests in flight."
    )
    drain_notice_seconds: float = Field(
        1.0,
        ge=0,
        le=600,
        description="After SIGTERM: how long to go on while /readyz already answers 503.",
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="`auto` is text on a terminal and JSON elsewhere."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least severe message that is logged."
    )
    metric_tasks: int = Field(
        200, ge=0, description="Versions of tasks with a metric of their own; more are `other`."
    )
    audit_log: Text | None = Field(
        None, description="File for who did what, each line chained to the last; `-` is stdout."
    )
    audit_predictions: bool = Field(False, description="Record predictions there too.")
    tracing: bool = Field(
        False, description="Send traces to an OpenTelemetry collector. Needs the extra `otel`."
    )

    @field_validator(
        "devices",
        "pinned_tasks",
        "allowed_hosts",
        "trusted_proxies",
        "oidc_algorithms",
        mode="before",
    )
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("devices")
    @classmethod
    def _some_device(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("name at least one device, or 'auto'")
        if "auto" in value and len(value) > 1:
            raise ValueError("'auto' stands alone")
        return value

    @model_validator(mode="before")
    @classmethod
    def _read_key_files(cls, given: dict[str, object]) -> dict[str, object]:
        keys = {name: _read_key(name, given) for name in ("api_key", "admin_key")}
        return {**given, **{name: key for name, key in keys.items() if key is not None}}

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise ValueError(f"{error}: write 10.0.0.7 or 10.0.0.0/8") from None
        return value

    @field_validator("oidc_algorithms")
    @classmethod
    def _asymmetric(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not OIDC_ALGORITHMS.issuperset(value):
            raise ValueError(f"choose from {', '.join(sorted(OIDC_ALGORITHMS))}")
        return value

    @field_validator("oidc_jwks")
    @classmethod
    def _safe_to_fetch(cls, value: str | None) -> str | None:
        url = urlsplit(value or "")
        if url.scheme == "http" and not is_loopback(url.hostname or ""):
            raise ValueError("over http anybody on the way could give us keys: use https")
        return value

    @field_validator("port", mode="before")
    @classmethod
    def _no_service_link(cls, value: object) -> object:
        # Kubernetes sets NAME_PORT for each service; one named `engram` shadows our variable.
        if isinstance(value, str) and "://" in value:
            raise ValueError(
                "this is the address of a Kubernetes service named 'engram', not a port: set "
                "enableServiceLinks: false in the pod, or rename the service"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_images > self.queue_images:
            raise ValueError(
                f"max_images ({self.max_images}) is above queue_images ({self.queue_images}): a "
                f"request of that many images could never be admitted"
            )
        largest = max(self.body_bytes, self.bundle_bytes)
        if largest > self.inflight_body_bytes:
            raise ValueError(
                f"inflight_body_bytes ({self.inflight_body_bytes}) is below body_bytes or "
                f"bundle_bytes ({largest}): a body of that size could never be received"
            )
        oidc = (self.oidc_issuer, self.oidc_audience, self.oidc_jwks)
        if any(oidc) and not all(oidc):
            raise ValueError("oidc_issuer, oidc_audience and oidc_jwks need one another")
        if self.tls_certificate is None and (self.tls_key or self.tls_client_ca):
            raise ValueError("tls_key and tls_client_ca mean nothing without tls_certificate")
        if not self.has_keys and not is_loopback(self.host):
            raise ValueError(
                f"host is {self.host!r}, which other machines can reach, and no key is set: "
                f"anybody could use and change the tasks. Set {PREFIX}API_KEY and "
                f"{PREFIX}ADMIN_KEY, or {PREFIX}KEYS_FILE, or listen on 127.0.0.1"
            )
        return self

    @property
    def has_keys(self) -> bool:
        """Whether a caller has to say who it is."""
        ways = (self.api_key, self.admin_key, self.keys_file, self.oidc_issuer)
        return any(way is not None for way in ways)


def load_settings(**overrides: object) -> Settings:
    """The settings of this process; overrides that are None count as not given."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]  # checked by pydantic, right here
    except ValidationError as error:
        raise SettingsError(_for_people(error)) from None


def _read_key(name: str, given: Mapping[str, object]) -> str | None:
    """The key in the file that is named for it, if one is; the line's end is not part of it."""
    path = given.get(f"{name}_file")
    if not path:
        return None
    variable = PREFIX + name.upper()
    if given.get(name) is not None:
        raise ValueError(f"{variable} and {variable}_FILE are both set: keep one")
    try:
        key = Path(str(path)).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{variable}_FILE: {path} cannot be read: {reason}") from None
    if not key:
        raise ValueError(f"{variable}_FILE: {path} is empty")
    return key


def misspelt_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like a setting and is none."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    sentences = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known | OTHERS:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near:
                sentences.append(f"{name} is no setting and is ignored: did you mean {near[0]}?")
    return sentences


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _for_people(error: ValidationError) -> str:
    """One sentence per problem, naming the variable; values are not repeated: some are secret."""
    sentences = []
    for each in error.errors(include_url=False, include_input=False):
        name = str(each["loc"][0]) if each["loc"] else None
        reason = each["msg"].removeprefix("Value error, ")
        if name is None:
            sentences.append(f"{reason[0].upper()}{reason[1:]}.")
        else:
            sentences.append(f"{PREFIX}{name.upper()}: {reason}.")
    return " ".join(sentences)
