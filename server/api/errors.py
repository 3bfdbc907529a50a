"""What can be wrong with a request before the engine or the store see it.

RequestError
├── MalformedRequest         not the JSON or the form it says it is
├── InvalidRequest           a value that is not allowed
│   ├── TooManyImages
│   └── TooManyTasks
├── BodyTooLarge             more bytes than allowed
├── UnsupportedMedia         a content type or encoding that is not read here
├── KeyRequired              no key, or a wrong one
├── NotPermitted             a key that reads, where changing is asked for
├── CrossOrigin              a change asked for by a page of another site
└── NotStarted               the server is still starting, or could not
"""

from server.errors import EngramError


class RequestError(EngramError):
    """A request that is refused for what it is, or for when it came."""


class MalformedRequest(RequestError):
    """Not the JSON or the form it says it is."""


class InvalidRequest(RequestError):
    """A value that is not allowed."""


class TooManyImages(InvalidRequest):
    """More images than one request may have."""


class TooManyTasks(InvalidRequest):
    """More tasks than one request may ask."""


class BodyTooLarge(RequestError):
    """More bytes than allowed."""


class UnsupportedMedia(RequestError):
    """A content type or encoding that is not read here."""


class KeyRequired(RequestError):
    """No key, or a wrong one."""


class NotPermitted(RequestError):
    """A key that reads, where changing is asked for."""


class CrossOrigin(RequestError):
    """A change asked for by a page of another site."""


class NotStarted(RequestError):
    """The server is still starting, or could not."""
