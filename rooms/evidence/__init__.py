"""Sign and verify evidence: publishers' signatures over messages, and the installation's receipts.

Nothing here has a database or a network: what verifies a receipt needs the receipt and keys.

jose                public and private keys as JWK (RFC 7517), named by their thumbprint (RFC 7638),
                    and JSON Web Signatures (RFC 7515), compact, EdDSA and ES256
message_signature   what a publisher signs: a message's identity and the hash of its payload
receipt             what the installation signs: what it accepted, and what became of it
"""
