"""Certificates for tests and benchmarks: an authority in a folder, and what it issues as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    certificate_file: str
    key_file: str
    serial: int

    @property
    def files(self) -> dict[str, str]:
        """As settings name them."""
        return {"certificate_file": self.certificate_file, "key_file": self.key_file}

    @property
    def pair(self) -> tuple[str, str]:
        """As clients of HTTP name them."""
        return self.certificate_file, self.key_file


class Authority:
    """Signs what it issues; `file` is its own certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._certificate(self._name, self._key.public_key()).add_extension(usage, critical=True)
        self.file = str(folder / f"{name}.pem")
        _replace(Path(self.file), _pem(certificate.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, *hosts: str, password: str = "") -> Issued:
        """For `hosts`, 127.0.0.1 without any; in place of what was issued under this name before, as one replaces
        files that are in use."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_host(host) for host in hosts or ("127.0.0.1",)])
        certificate = (
            self._certificate(_name(name), key.public_key())
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        encryption = (
            serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        )
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        issued = Issued(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"), certificate.serial_number)
        _replace(Path(issued.certificate_file), _pem(certificate))
        _replace(Path(issued.key_file), private)
        return issued

    def _certificate(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _replace(file: Path, content: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, file)
