"""All server settings, declared once.

Each field is read from the environment variable `ENGRAM_<NAME>`; command-line options take
precedence. Nothing is read until `load_settings` is called. `make reference` generates the table in
docs/reference/configuration.md.
"""

import difflib
import ipaddress
import os
import re
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

from engram_server import embedded
from engram_server.engine.rollout.rules import Rule
from engram_server.errors import SettingsError

PREFIX = "ENGRAM_"
# Variables of the command line and the client.
OTHERS = frozenset({f"{PREFIX}SERVER", f"{PREFIX}DEBUG"})

_SERVICE_LINK = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)

# As browsers write it: scheme, host and a port that is not the default one.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")

KIB, MIB, GIB = 1024, 1024**2, 1024**3

# A list in one variable: `cuda:0,cuda:1`.
CommaList = Annotated[tuple[str, ...], NoDecode]
SecretKey = Annotated[SecretStr, Field(min_length=8)]
# Asymmetric algorithms only.
OIDC_ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
# Totals, of which each of several processes gets an equal share. All others hold for each process.
DIVIDED = (
    "torch_threads",
    "decode_threads",
    "resident_bytes",
    "queue_images",
    "cache_bytes",
    "decoded_bytes",
    "inflight_body_bytes",
    "inflight_bundle_bytes",
    "inflight_answer_bytes",
)
# To decode an ordinary JPEG or PNG file, per pixel.
_DECODING_BYTES = 8


class Settings(BaseSettings):
    """The settings of one server."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    # Backbone and tasks
    backbone: Text = Field(default_factory=lambda: str(embedded.BACKBONE))
    """The frozen backbone: a folder, or a Hugging Face model: `org/name[@revision]`."""
    image_size: int | None = Field(None, ge=16, le=4096)
    """Image size in pixels (default: the backbone's own)."""
    store: Text = ".engram/store"
    """The task store: a folder, or a file, s3, gs or az URL."""
    pinned_tasks: CommaList = ()
    """Tasks that always stay on the device."""
    shadow_aliases: CommaList = ("shadow",)
    """Aliases whose versions are compared with the answers, without being returned."""
    shadow_thumbnails: bool = False
    """Keep thumbnails of the last images on which a shadow differs, in memory."""
    rollback_rules: CommaList = ()
    """Rules such as `errors>0.05,out_of_distribution>0.5` that roll a new version back."""
    poll_seconds: float = Field(1.0, gt=0, le=3600)
    """Interval for polling the store for changes."""
    heartbeat_seconds: float = Field(5.0, ge=0, le=60)
    """Interval of this replica's heartbeat in the store; 0 disables it."""
    bundle_cache: Text = ".engram/bundles"
    """Folder that caches the bundles of a remote store."""
    bundle_cache_bytes: ByteSize = ByteSize(4 * GIB)
    """Disk space for that folder; 0 disables it."""
    keep_pictures: bool = True
    """Keep a thumbnail and the file name of each photo that a task is taught."""
    max_corrections: int = Field(100_000, ge=1)
    """Maximum corrections of one task; more are rejected with 409."""
    correction_bytes: ByteSize = Field(ByteSize(64 * MIB), ge=KIB)
    """Maximum bytes of the corrections of one task; more are rejected with 409."""
    correction_days: float | None = Field(None, gt=0)
    """Delete corrections after this many days. Unset: keep them."""

    # Network and keys
    host: Text = "127.0.0.1"
    """Address to listen on. Addresses other than loopback require a key."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 selects a free port."""
    grpc_port: int | None = Field(None, ge=0, le=65535)
    """Port for gRPC; 0 selects a free port. Unset: none. Requires the extra `grpc`."""
    api_key: SecretKey | None = None
    """Key for predict, read and metrics; for everything if it is the only key."""
    admin_key: SecretKey | None = None
    """Key with all scopes."""
    keys_file: Text | None = None
    """File of further keys with scopes, managed with `engram keys`."""
    allowed_hosts: CommaList = ()
    """Additional `Host` names accepted by a server without keys."""
    cors_origins: CommaList = ()
    """Sites whose pages may use the API from a browser: `https://app.example`, or `*`."""
    share_contexts: bool = False
    """Share cached contexts between all keys."""
    api_key_file: Text | None = None
    """File with the API key, instead of the variable."""
    admin_key_file: Text | None = None
    """File with the admin key, instead of the variable."""

    tls_certificate: Text | None = None
    """Certificate chain for HTTPS: a PEM file."""
    tls_key: Text | None = None
    """Private key: a PEM file (default: the certificate file)."""
    tls_key_password_file: Text | None = None
    """File with the password of the private key."""
    tls_client_ca: Text | None = None
    """CA certificates for client certificates: a PEM file. Unset: not requested."""
    tls_client_certificates: Literal["required", "optional"] = "required"
    """With a client CA: `required` rejects clients without a certificate."""
    trusted_proxies: CommaList = ()
    """Proxies whose X-Forwarded-For is trusted: addresses or networks."""

    # OpenID Connect
    oidc_issuer: Text | None = None
    """Accepted issuer (`iss`). Requires the extra `openid`."""
    oidc_audience: Text | None = None
    """Required audience (`aud`)."""
    oidc_jwks: Text | None = None
    """The provider's public keys (JWKS): a file or a URL."""
    oidc_algorithms: CommaList = ("RS256", "ES256")
    """Accepted signature algorithms."""
    oidc_leeway_seconds: float = Field(30.0, ge=0, le=300)
    """Allowed clock difference."""
    oidc_scope_claim: Text = "scope"
    """Claim with the scopes, for example `engram:predict:team-a/*`."""

    # Device
    devices: CommaList = ("auto",)
    """Devices, one worker each: `cuda:0,cuda:1`. `auto`: cuda:0, else cpu."""
    processes: int = Field(1, ge=1, le=64)
    """Server processes on the port, each a replica with its own copy of the backbone."""
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Precision of the backbone. `auto`: bfloat16 on GPUs, else float32. `int8`: CPUs only."""
    compile: bool = False
    """Compile the pass with torch.compile; slower start."""
    torch_threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads per pass (default: torch's choice)."""
    resident_bytes: ByteSize | None = None
    """Device memory for tasks; the least used move to the host. Unset: no limit."""

    # Batching and admission
    budget_rows: int = Field(4096, ge=1)
    """Token rows per batch: image tokens plus one row per image and task."""
    queue_images: int = Field(256, ge=1)
    """Images admitted and not yet answered; more get 429. One caller may have half."""
    decode_threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=1024)
    """Threads that decode and resize images (default: one per core)."""
    default_deadline_ms: float | None = Field(None, gt=0)
    """Deadline of requests without X-Deadline-Ms. Unset: none."""

    # Context cache
    cache_bytes: ByteSize = ByteSize(GIB)
    """Memory for cached image contexts; 0 disables the cache."""
    cache_precision: Literal["float16", "bfloat16", "float32"] = "float16"
    """Precision of cached contexts."""
    cache_device: Literal["host", "device"] = "host"
    """Where contexts are cached: host memory, or the device that computed them."""

    # Request limits
    body_bytes: ByteSize = Field(ByteSize(32 * MIB), ge=KIB)
    """Maximum body of a prediction request."""
    bundle_bytes: ByteSize = Field(ByteSize(256 * MIB), ge=KIB)
    """Maximum size of an uploaded bundle."""
    max_pixels: int = Field(64_000_000, ge=1)
    """Maximum pixels of an image, checked on its header."""
    decoded_bytes: ByteSize = Field(ByteSize(GIB), ge=MIB)
    """Memory for all images being decoded; an image that needs more is rejected."""
    decode_seconds: float = Field(10.0, gt=0, le=3600)
    """CPU time to decode one image; an image that takes longer is rejected."""
    max_images: int = Field(64, ge=1)
    """Maximum images per request."""
    max_tasks: int = Field(256, ge=1)
    """Maximum tasks per request."""

    json_values: int = Field(500_000, ge=1000)
    """Maximum JSON values in a /v2 inference request."""
    answer_bytes: ByteSize = Field(ByteSize(16 * MIB), ge=KIB)
    """Maximum response size of a prediction, estimated in advance."""

    # Connection limits
    connections: int = Field(2000, ge=1)
    """Maximum open connections; more get 503."""
    connections_per_address: int = Field(1000, ge=1)
    """Maximum per IPv4 address or IPv6 /64 network; more get 503."""
    header_bytes: ByteSize = Field(ByteSize(32 * KIB), ge=KIB)
    """Maximum size of request line, headers and trailers; else 431."""
    header_count: int = Field(100, ge=8)
    """Maximum number of headers and trailers; else 431."""
    header_seconds: float = Field(10.0, gt=0, le=3600)
    """Time to receive the headers, from the first byte; else 408."""
    body_seconds: float = Field(30.0, gt=0, le=3600)
    """Time to receive the body, from the first byte; else 408."""
    bundle_seconds: float = Field(600.0, gt=0, le=86400)
    """Time to receive a bundle; else 408."""
    idle_seconds: float = Field(30.0, gt=0, le=3600)
    """Idle timeout between requests."""
    send_seconds: float = Field(30.0, gt=0, le=3600)
    """Time for the client to read the response."""
    min_bytes_per_second: ByteSize = Field(ByteSize(16 * KIB), ge=1)
    """Minimum rate of uploaded bundles and of responses, over `body_seconds` or `send_seconds`."""
    inflight_body_bytes: ByteSize = Field(ByteSize(512 * MIB), ge=KIB)
    """Bytes of all request bodies in memory; more get 429. One caller may have half."""
    inflight_bundle_bytes: ByteSize = Field(ByteSize(GIB), ge=KIB)
    """Bytes of all bundles being uploaded, on disk; more get 429. One caller may have half."""
    inflight_answer_bytes: ByteSize = Field(ByteSize(512 * MIB), ge=KIB)
    """Bytes of all large responses being sent; more get 429. One caller may have half."""
    max_validations: int = Field(4, ge=1)
    """Concurrent bundle validations; more get 429. One caller may have half."""
    max_downloads: int = Field(8, ge=1)
    """Concurrent bundle downloads; more get 429. One caller may have half."""

    # Operations
    drain_seconds: float = Field(30.0, ge=0, le=3600)
    """Time to wait for requests in flight at shutdown."""
    drain_notice_seconds: float = Field(1.0, ge=0, le=600)
    """Time to keep serving after SIGTERM while /readyz returns 503."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """`auto`: text on a terminal, JSON elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of logged messages."""
    metric_tasks: int = Field(200, ge=0)
    """Task versions with their own metric labels; more are labelled `other`."""
    audit_log: Text | None = None
    """File for the hash-chained audit log; `-` is stdout."""
    audit_predictions: bool = False
    """Also record predictions in the audit log."""
    tracing: bool = False
    """Send traces to an OpenTelemetry collector. Requires the extra `tracing`."""

    @field_validator(
        "devices",
        "pinned_tasks",
        "shadow_aliases",
        "rollback_rules",
        "allowed_hosts",
        "cors_origins",
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
            raise ValueError("specify at least one device, or 'auto'")
        if "auto" in value and len(value) > 1:
            raise ValueError("'auto' cannot be combined with other devices")
        return value

    @model_validator(mode="before")
    @classmethod
    def _read_key_files(cls, values: dict[str, object]) -> dict[str, object]:
        keys = {name: _read_key(name, values) for name in ("api_key", "admin_key")}
        return {**values, **{name: key for name, key in keys.items() if key is not None}}

    @field_validator("shadow_aliases")
    @classmethod
    def _not_default(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "default" in value:
            raise ValueError("'default' answers requests and cannot be a shadow")
        return value

    @field_validator("rollback_rules")
    @classmethod
    def _rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            Rule.parse(each)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if each != "*" and _ORIGIN.fullmatch(each) is None:
                raise ValueError(
                    f"'{each}' is not an origin. Write it as browsers do, without a path and in "
                    f"lower case: https://app.example or http://localhost:5173"
                )
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise ValueError(f"{error}. Examples: 10.0.0.7, 10.0.0.0/8") from None
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
            raise ValueError("plain http would let an attacker replace the keys: use https")
        return value

    @field_validator("port", "grpc_port", mode="before")
    @classmethod
    def _no_service_link(cls, value: object) -> object:
        # Kubernetes sets NAME_PORT for each service: `engram` or `engram-grpc` shadows ours.
        if isinstance(value, str) and "://" in value:
            raise ValueError(
                "this is the address of a Kubernetes service whose name begins with 'engram', not "
                "a port. Set enableServiceLinks: false in the pod, or rename the service"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_images > self.queue_images:
            raise ValueError(
                f"max_images ({self.max_images}) must not exceed queue_images ({self.queue_images})"
            )
        # One caller gets half of a pool, and the largest request must fit into it.
        for name, largest in (
            ("inflight_body_bytes", "body_bytes"),
            ("inflight_bundle_bytes", "bundle_bytes"),
            ("inflight_answer_bytes", "answer_bytes"),
        ):
            pool, needed = getattr(self, name), 2 * getattr(self, largest)
            if pool < needed:
                raise ValueError(f"{name} ({pool}) must be at least twice {largest} ({needed})")
        oidc = (self.oidc_issuer, self.oidc_audience, self.oidc_jwks)
        if any(oidc) and not all(oidc):
            raise ValueError("set all of oidc_issuer, oidc_audience and oidc_jwks, or none")
        if "*" in self.cors_origins and not self.has_keys:
            raise ValueError(
                "cors_origins is '*' and no key is set, so a page of any site could use this "
                "server. Name the origins, or set keys"
            )
        if self.tls_certificate is None and (self.tls_key or self.tls_client_ca):
            raise ValueError("tls_key and tls_client_ca require tls_certificate")
        if not self.has_keys and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines, and no key is set. Set "
                f"{PREFIX}API_KEY and {PREFIX}ADMIN_KEY, or {PREFIX}KEYS_FILE, or listen on "
                f"127.0.0.1"
            )
        return self

    def for_one_process(self, torch_threads: int) -> "Settings":
        """The settings of each process; `torch_threads` is the default for all of them.

        A share is never smaller than what the largest request needs.
        """
        whole = self.model_copy(update={"torch_threads": self.torch_threads or torch_threads})
        smallest = {
            "torch_threads": 1,
            "decode_threads": 1,
            "queue_images": self.max_images,
            "decoded_bytes": _DECODING_BYTES * self.max_pixels,
            "inflight_body_bytes": 2 * self.body_bytes,
            "inflight_bundle_bytes": 2 * self.bundle_bytes,
            "inflight_answer_bytes": 2 * self.answer_bytes,
        }
        shares = {}
        for name in DIVIDED:
            total = getattr(whole, name)
            if total is not None:
                share = max(total // self.processes, min(total, smallest.get(name, 0)))
                shares[name] = type(total)(share)
        return whole.model_copy(update=shares)

    @property
    def several_callers(self) -> bool:
        """Whether callers can be distinguished, so that each gets a share of the capacity."""
        both = self.api_key is not None and self.admin_key is not None
        return both or self.keys_file is not None or self.oidc_issuer is not None

    @property
    def has_keys(self) -> bool:
        """Whether callers must authenticate."""
        ways = (self.api_key, self.admin_key, self.keys_file, self.oidc_issuer)
        return any(way is not None for way in ways)


def load_settings(**overrides: object) -> Settings:
    """Read the settings of this process; overrides that are None are ignored."""
    values = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**values)  # type: ignore[arg-type]  # pydantic checks them
    except ValidationError as error:
        raise SettingsError(_sentences(error)) from None


def _read_key(name: str, values: Mapping[str, object]) -> str | None:
    """Read a key from its `_file` setting, without the trailing newline."""
    path = values.get(f"{name}_file")
    if not path:
        return None
    variable = PREFIX + name.upper()
    if values.get(name) is not None:
        raise ValueError(f"{variable} and {variable}_FILE are mutually exclusive")
    try:
        key = Path(str(path)).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{variable}_FILE: cannot read {path}: {reason}") from None
    if not key:
        raise ValueError(f"{variable}_FILE: {path} is empty")
    return key


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable with our prefix that is not a setting."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    sentences = []
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or name in known | OTHERS or _is_service_link(name, value):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f" Did you mean {near[0]}?" if near else ""
        sentences.append(f"Unknown setting {name} is ignored.{hint}")
    return sentences


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set the variable, for a service named `engram` or `engram-…`."""
    return _SERVICE_LINK.fullmatch(name) is not None or (name.endswith("_PORT") and "://" in value)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _sentences(error: ValidationError) -> str:
    """One sentence per error, naming the variable but not the value, which may be secret."""
    sentences = []
    for each in error.errors(include_url=False, include_input=False):
        name = str(each["loc"][0]) if each["loc"] else None
        reason = each["msg"].removeprefix("Value error, ")
        if name is None:
            sentences.append(f"{reason[0].upper()}{reason[1:]}.")
        else:
            sentences.append(f"{PREFIX}{name.upper()}: {reason}.")
    return " ".join(sentences)
