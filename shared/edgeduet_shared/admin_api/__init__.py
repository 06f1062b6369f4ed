"""The admin service's API, seen by the service and by ``edgeduet-admin``.

``admin_pb2.py`` and ``admin_pb2.pyi`` are generated (grpcio-tools 1.75.1); after a change of ``admin.proto``::

    python -m grpc_tools.protoc -I shared --python_out=shared --pyi_out=shared \\
        shared/edgeduet_shared/admin_api/admin.proto

Neither side uses generated stubs: the service checks tokens before it parses a message, and the client needs one call.
"""
