"""From the tests' vocabulary (``tests.interop.client``) to each client library."""
