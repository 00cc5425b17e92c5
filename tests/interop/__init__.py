"""Real Kafka clients, unmodified, against a real broker process."""

import pytest

pytest.register_assert_rewrite(
    "tests.interop.admin_contract",
    "tests.interop.groups_contract",
    "tests.interop.records_contract",
    "tests.interop.transactions_contract",
)
