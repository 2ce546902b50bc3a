"""TLS for gRPC servers whose certificates change while they run."""

from __future__ import annotations

import grpc

from configuration.tls import Kept, ServerMaterial


def server_credentials(kept: Kept[ServerMaterial]) -> grpc.ServerCredentials:
    """Each new connection gets what is current when it begins. Callers must present a certificate where an authority
    for them is named, now and later: that does not change without a restart."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        material = kept.current
        return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.client_ca)

    requires = kept.current.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=requires)
