"""The masking of secrets in a run's records: arguments, hyperparameters, addresses.

Only a name shows whether a value is a secret, and names of machine learning are similar. "api_key" and
"hub_token" are secrets; "key_dim", "max_tokens", "eos_token", "image_key", "tokenizer" and "monkey" are not.
In doubt a value is masked.
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

_MASK = "***"
# Anywhere in a name: "password_hash", "client_secret_id".
_SECRET = {"authorization", "credential", "passphrase", "passwd", "password", "pwd", "secret"}
# As its last word, in the singular: "api_key", "hftoken", "sshkey"; neither "key_dim" nor "monkey".
_SECRET_LAST = re.compile("(api|access|auth|private|ssh)?keys?|[a-z]*token|(api|access)tokens")
# Before a key or token they leave no doubt, whatever else is in the name: "image_api_keys".
_DOUBTLESS = {"access", "api", "auth", "private", "refresh"}
# Tokens of tokenizers; keys of dictionaries, tables and attention.
_PLAIN = {
    *("additional", "bos", "cls", "end", "eos", "extra", "image", "mask", "new", "pad", "prompt", "sep"),
    *("special", "start", "stop", "unk"),
    *("audio", "batch", "cache", "caption", "column", "data", "dict", "feature", "foreign", "group", "index"),
    *("input", "label", "loss", "metric", "output", "primary", "sort", "state", "target", "text", "video"),
}
_COUNTS = {"count", "max", "min", "n", "num", "total"}  # as a name's first word: "num_keys"

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_USER_INFO = re.compile(r"\b([\w+.-]+://[^/\s:@]*):[^/\s]*@|\b(https?://)[^/\s:@]+@")
_HEADER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+")
_ASSIGNED = re.compile(r"""([\w.-]+)["']?\s*[=:]\s*["']?""")
_VALUE = re.compile(r"""(?<=")[^"]+|(?<=')[^']+|(?:Bearer |Basic )?[^\s,;&(){}\[\]"']+""")
_NAME = re.compile(r"-*[\w.-]+")


def mask_secrets(value: Any) -> Any:
    """Return values with ``***`` in place of those named as a token, key, secret or password.

    It looks into mappings, lists, dataclasses and namespaces; the last two become dicts. In texts, passwords
    of URLs and values of "token=..." are masked.
    """
    return _masked(value, "", is_within=False)


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command, with the values of ``--token x``, ``--token=x``, ``TOKEN=x`` masked."""
    masked, follow = [], 0  # how many of the next words are values of a secret
    for word in arguments:
        name, equals, value = word.partition("=")
        if follow and not word.startswith("--"):
            masked.append(_MASK)
            follow -= 1
            continue
        is_option = word.startswith("-")
        is_name = (is_option or equals) and _NAME.fullmatch(name)
        is_secret = bool(is_name) and _is_secret(name.rpartition(".")[2])
        follow = 0
        if is_option and is_secret and not equals:
            follow = len(arguments) if name.endswith("s") else 1  # "--api-keys" takes several
        if is_secret and equals:
            masked.append(f"{name}={_MASK if value else ''}")
        else:
            masked.append(_masked_text(word))
    return masked


def _masked(value: Any, name: str, *, is_within: bool) -> Any:
    is_secret = is_within or _is_secret(name)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Namespace | SimpleNamespace):
        value = vars(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _masked(item, str(key), is_within=is_secret) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_masked(item, name, is_within=is_secret) for item in value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | complex):  # a numeric "token" is an id; a numeric "password" is a PIN
        return _MASK if _SECRET & {*_words(name)} else value
    if is_secret:
        return _MASK if value else value
    text = value if isinstance(value, str) else str(value)
    masked = _masked_text(text)
    return value if masked == text else masked  # loggers write other objects as text


def _masked_text(text: str) -> str:
    text = _USER_INFO.sub(lambda found: f"{found[1]}:{_MASK}@" if found[1] else f"{found[2]}{_MASK}@", text)
    parts: list[str] = []
    at = 0
    for found in _ASSIGNED.finditer(text):
        if found.start() >= at and _is_secret(found[1]) and (value := _VALUE.match(text, found.end())):
            parts += text[at : found.end()], _MASK
            at = value.end()
    return _HEADER.sub(rf"\1 {_MASK}", "".join([*parts, text[at:]]))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def _is_secret(name: str) -> bool:
    words = _words(name)
    if any(word.removesuffix("s") in _SECRET for word in words):
        return True
    if not words or not _SECRET_LAST.fullmatch(words[-1]):
        return bool(words[1:]) and words[-2] in _DOUBTLESS and words[-1] == "tokens"
    if words[1:] and words[-2] in _DOUBTLESS:
        return True
    return words[0] not in _COUNTS and not (words[1:] and words[-2] in _PLAIN)
