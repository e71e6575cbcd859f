"""`farandole certificates DIR`: makes a certificate authority for a job, and the certificate of its processes."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.base.command_parser import USAGE_ERROR, Parser, add_json
from farandole.base.wire.encryption import AUTHORITY, CERTIFICATE, KEY, Certificates
from farandole.base.wire.user_secret import replace_file
from farandole.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_KEY = "ca-key.pem"
_DAYS = 365
_CLOCKS_DIFFER = datetime.timedelta(days=1)


def certificates_command(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code. Raises SystemExit as argparse does."""
    parser = certificates_parser()
    given = parser.parse_args(arguments)
    try:
        made = make_certificates(given.folder, given.days)
        Certificates(str(given.folder))
        print(json.dumps(made.as_dict()) if given.json else made)
    except ConfigError as error:
        print(f"farandole certificates: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def certificates_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole certificates",
        description="Make the certificates of a job whose connections are encrypted, for `farandole run --tls DIR`: a "
        f"certificate authority ({AUTHORITY}, {AUTHORITY_KEY}) and the certificate of all processes of the job "
        f"({CERTIFICATE}, {KEY}). In a folder that has an authority, it makes only another certificate. Copy the "
        f"folder, without {AUTHORITY_KEY}, to each machine of the job. Needs the package extra farandole[tls].",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the files; made if it does not exist")
    parser.add_argument(
        "--days",
        type=int,
        default=_DAYS,
        metavar="N",
        help="days for which the certificate, and a new authority, are valid (default: %(default)s)",
    )
    add_json(parser)
    return parser


@dataclass(frozen=True)
class Made:
    """The files that were made; as text, a sentence about them."""

    folder: Path
    has_new_authority: bool
    valid_until: datetime.datetime

    def __str__(self) -> str:
        what = "the certificate authority and the certificate" if self.has_new_authority else "the certificate"
        until = f"{self.valid_until:%Y-%m-%d}"
        return f"made {what} in {self.folder}, valid until {until}; use them with: farandole run --tls {self.folder}"

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        until = self.valid_until.isoformat(timespec="seconds")
        return {"folder": str(self.folder), "has_new_authority": self.has_new_authority, "valid_until": until}


def make_certificates(folder: Path, days: int = _DAYS, now: datetime.datetime | None = None) -> Made:
    """Make the files of the folder, and return what was made. `now`: when the days begin; None: now. Raises ConfigError
    when the package `cryptography` is missing, when a file cannot be read or written, and for a folder in which another
    user can replace files."""
    if not 1 <= days <= 36_500:
        raise ConfigError(f"--days must be between 1 and 36500, got {days}")
    try:
        from cryptography import x509  # noqa: F401 - the next line of the traceback would name a part of it
    except ImportError:
        raise ConfigError(
            "making certificates needs the package cryptography: pip install 'farandole[tls]'. Files of another "
            f"program will do as well: {AUTHORITY}, {CERTIFICATE} and {KEY}, in PEM"
        ) from None
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o022:
            raise ConfigError(f"others may write into {folder}, and so replace the files: chmod 700 {folder}")
        has_authority = (folder / AUTHORITY).exists() and (folder / AUTHORITY_KEY).exists()
        until = now + datetime.timedelta(days=days)
        if has_authority:
            authority = _read_authority(folder)
        else:
            name = "Farandole job certificate authority"
            authority = _make(folder / AUTHORITY, folder / AUTHORITY_KEY, name, now, until)
        until = min(until, authority[0].not_valid_after_utc)
        certificate, _ = _make(folder / CERTIFICATE, folder / KEY, "Farandole job", now, until, authority)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    return Made(folder, not has_authority, certificate.not_valid_after_utc)


def _read_authority(folder: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
        if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ValueError("the key is not that of the authority")
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{AUTHORITY} or {AUTHORITY_KEY} in {folder} is not valid ({error}): remove both, and new ones are made, "
            "with which all machines of the job need another copy of the folder"
        ) from None
    if certificate.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(
            f"the authority in {folder} has expired on {certificate.not_valid_after_utc:%Y-%m-%d}: remove {AUTHORITY} "
            f"and {AUTHORITY_KEY}, and a new one is made"
        )
    return certificate, key


def _make(
    file: Path,
    key_file: Path,
    name: str,
    now: datetime.datetime,
    until: datetime.datetime,
    authority: tuple[x509.Certificate, EllipticCurvePrivateKey] | None = None,
) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    """Make a key, and a certificate for it that the authority signs; None: that of an authority, which signs its own.
    The extensions are those that RFC 5280 wants, as far as OpenSSL's strict verification checks them
    (VERIFY_X509_STRICT, on by default from Python 3.13)."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key, is_authority = ec.generate_private_key(ec.SECP256R1()), authority is None
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, issuer_key = (subject, key) if authority is None else (authority[0].subject, authority[1])
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if not is_authority:
        both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
    certificate = builder.sign(issuer_key, SHA256())
    replace_file(key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    replace_file(file, certificate.public_bytes(Encoding.PEM), 0o644)
    return certificate, key
