"""Say which member of the installation a caller is, by a client identifier or a certificate.

An identifier is `instance/class/code`, as in X-Road, with a fourth part where it names an
application of the member. Nothing here verifies a certificate: TLS has done that.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.sharing import is_application, is_member_id

MAX_IDENTIFIER: Final = 4 * 64 + 3
"""The longest identifier, in characters."""
_MEMBER_PARTS: Final = 3
_FIELD: Final = re.compile(r"\{([A-Za-z]+)\}")
_URI: Final = "uri="
_SUBJECT: Final = "subject="
SUBJECT_ATTRIBUTES: Final[Mapping[str, str]] = {
    "C": "2.5.4.6",
    "O": "2.5.4.10",
    "OU": "2.5.4.11",
    "CN": "2.5.4.3",
    "L": "2.5.4.7",
    "ST": "2.5.4.8",
    "serialNumber": "2.5.4.5",
    "organizationIdentifier": "2.5.4.97",
    "UID": "0.9.2342.19200300.100.1.1",
}
"""The attributes that a subject rule may name, with their object identifiers."""
DEFAULT_RULES: Final = "uri=urn:govstack:member:,subject={C}/{O}/{CN}"


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """Name a member of the installation, and one of its applications if there is one."""

    member_id: str
    application: str | None = None

    @classmethod
    def parse(cls, text: str) -> "MemberIdentity":
        """Read `instance/class/code` or `instance/class/code/application`. ValueError."""
        parts = text.split("/", _MEMBER_PARTS) if len(text) <= MAX_IDENTIFIER else []
        member = "/".join(parts[:_MEMBER_PARTS])
        application = parts[_MEMBER_PARTS] if len(parts) > _MEMBER_PARTS else None
        if not is_member_id(member) or not (application is None or is_application(application)):
            raise ValueError(
                "it is not instance/class/code or instance/class/code/application, each part of"
                " 1 to 64 of the characters a-z, A-Z, 0-9, '_', '.' and '-'"
            )
        return cls(member, application)


@dataclass(frozen=True, slots=True)
class CertificateNames:
    """Hold the names in a certificate: of its subject by object identifier, and its SAN URIs."""

    subject: Mapping[str, Sequence[str]]
    uris: Sequence[str]


@dataclass(frozen=True, slots=True)
class _UriRule:
    prefix: str

    def find(self, names: CertificateNames) -> str | None:
        found = {uri for uri in names.uris if uri.startswith(self.prefix)}
        if len(found) > 1:
            raise ValueError(f"it has several URIs that begin with {self.prefix}")
        return found.pop().removeprefix(self.prefix) if found else None


@dataclass(frozen=True, slots=True)
class _SubjectRule:
    template: str

    def find(self, names: CertificateNames) -> str | None:
        values: dict[str, str] = {}
        for attribute in _FIELD.findall(self.template):
            found = names.subject.get(SUBJECT_ATTRIBUTES[attribute], ())
            if not found:
                return None
            if len(found) > 1:
                raise ValueError(f"its subject has the attribute {attribute} several times")
            if "/" in found[0]:
                raise ValueError(f"the attribute {attribute} of its subject contains a slash")
            values[attribute] = found[0]
        return _FIELD.sub(lambda match: values[match[1]], self.template)


@dataclass(frozen=True, slots=True)
class CertificateRules:
    """Find the member that a certificate names.

    The first rule that finds something decides. What it finds must be an identifier: a later rule
    is no way around a malformed name.
    """

    rules: tuple[_UriRule | _SubjectRule, ...]

    @classmethod
    def parse(cls, text: str) -> "CertificateRules":
        """Read rules, with commas between them: `uri=PREFIX` and `subject={C}/{O}/{CN}`.

        ValueError.
        """
        return cls(tuple(_parse_rules(text)))

    def identify(self, names: CertificateNames) -> MemberIdentity:
        """Return the member that a certificate names. ValueError says why it names none."""
        for rule in self.rules:
            found = rule.find(names)
            if found is not None:
                try:
                    return MemberIdentity.parse(found)
                except ValueError as exc:
                    raise ValueError(
                        f"it names no member: of {found[:MAX_IDENTIFIER]!r}, {exc}"
                    ) from exc
        raise ValueError("neither its subject nor a URI of it names a member")


def _parse_rules(text: str) -> Iterator[_UriRule | _SubjectRule]:
    for rule in (part.strip() for part in text.split(",")):
        if rule.startswith(_URI) and len(rule) > len(_URI):
            yield _UriRule(rule.removeprefix(_URI))
        elif rule.startswith(_SUBJECT):
            template = rule.removeprefix(_SUBJECT)
            named = _FIELD.findall(template)
            unknown = [name for name in named if name not in SUBJECT_ATTRIBUTES]
            if not named or unknown:
                raise ValueError(
                    f"{rule!r} names {', '.join(unknown) or 'no attribute'} of the subject;"
                    f" there are {', '.join(SUBJECT_ATTRIBUTES)}"
                )
            try:
                MemberIdentity.parse(_FIELD.sub("x", template))
            except ValueError as exc:
                raise ValueError(f"{rule!r} makes no identifier: {exc}") from exc
            yield _SubjectRule(template)
        else:
            raise ValueError(
                f"{rule!r} is no rule; it takes uri=PREFIX and subject=TEMPLATE, for example"
                f" {DEFAULT_RULES}"
            )
