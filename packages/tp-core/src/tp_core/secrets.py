"""Secrets in names, texts and command lines, which neither a log nor a file of a job may keep.

Only a name shows whether a value is a secret, and names of machine learning are similar. "api_key" and
"hub_token" are secrets; "key_dim", "max_tokens", "eos_token", "image_key", "tokenizer" and "monkey" are not.
In doubt a value is masked.
"""

import re
from collections.abc import Sequence

__all__ = ["MASK", "is_secret", "mask_arguments", "mask_text"]

MASK = "***"
"""What stands in the place of a secret."""

# Anywhere in a name: "password_hash", "client_secret_id".
_PASSWORD = {"authorization", "credential", "passphrase", "passwd", "password", "pwd", "secret"}
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


def is_secret(name: str, *, is_number: bool = False) -> bool:
    """Return whether a value of this name is a secret.

    Args:
        name: The name of an option, a variable or a field.
        is_number: Whether the value is a number: one called "token" is an id, one called "password" a PIN.
    """
    words = _words(name)
    if any(word.removesuffix("s") in _PASSWORD for word in words):
        return True
    if is_number or not words:
        return False
    *before, last = words
    follows_doubtless = bool(before) and before[-1] in _DOUBTLESS
    if not _SECRET_LAST.fullmatch(last):
        return follows_doubtless and last == "tokens"
    if follows_doubtless:
        return True
    return words[0] not in _COUNTS and not (before and before[-1] in _PLAIN)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def mask_text(text: str) -> str:
    """Return a text with ``***`` for passwords of URLs, values of "token=..." and authorization headers."""
    text = _USER_INFO.sub(_without_user_info, text)
    parts: list[str] = []
    at = 0
    for name in _ASSIGNED.finditer(text):
        if name.start() < at or not is_secret(name[1]):
            continue
        value = _VALUE.match(text, name.end())
        if value is not None:
            parts += text[at : name.end()], MASK
            at = value.end()
    return _HEADER.sub(rf"\1 {MASK}", "".join([*parts, text[at:]]))


def _without_user_info(address: re.Match[str]) -> str:
    # A name before a password stays; one alone, as "https://token@host", may be the secret itself.
    return f"{address[1]}:{MASK}@" if address[1] else f"{address[2]}{MASK}@"


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command, with the values of ``--token x``, ``--token=x``, ``TOKEN=x`` masked."""
    masked: list[str] = []
    to_mask = 0  # how many of the next words are values of a secret
    for word in arguments:
        if to_mask and not word.startswith("--"):
            masked.append(MASK)
            to_mask -= 1
            continue
        to_mask = 0
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        is_name = (is_option or equals) and _NAME.fullmatch(name)
        if not is_name or not is_secret(name.rpartition(".")[2]):
            masked.append(mask_text(word))
        elif equals:
            masked.append(f"{name}={MASK if value else ''}")
        else:
            masked.append(word)
            to_mask = len(arguments) if name.endswith("s") else 1  # "--api-keys" takes several
    return masked
