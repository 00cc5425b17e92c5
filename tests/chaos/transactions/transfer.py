"""A client that transfers money: each transaction takes from one account and gives to others, or is aborted.

Each account is a partition. A record says of which transfer it is, whether that is meant to be committed, and
what it does to every account, so that whoever reads one record knows which others must be there.
"""

from __future__ import annotations

import random
import time
from itertools import count

from tests.chaos.transactions.bank import Transfer
from tests.chaos.transactions.program import Transaction, producer, run

ACCOUNTS_MAX = 5


def main(given: dict[str, str]) -> None:
    choose = random.Random(given["seed"])
    made = producer(given, linger_ms=choose.choice((0, 2, 5)))
    for number in count():
        transfer = drawn(choose, given, number)
        transaction = Transaction(made, number)
        transaction.attempt(lambda: work(transaction, transfer, choose, given))  # noqa: B023
        time.sleep(choose.uniform(0, 2) / float(given["rate"]))


def drawn(choose: random.Random, given: dict[str, str], number: int) -> Transfer:
    accounts = int(given["partitions"])
    shares = 2 if choose.random() < 0.8 else choose.randint(2, min(ACCOUNTS_MAX, accounts))
    chosen = choose.sample(range(accounts), shares)
    amounts = [choose.randint(1, 100) for _ in chosen[1:]]
    return Transfer(
        client=int(given["client"]),
        instance=int(given["instance"]),
        number=number,
        is_meant=choose.random() < 0.85,
        amounts=dict(zip(chosen, [-sum(amounts), *amounts], strict=True)),
    )


def work(transaction: Transaction, transfer: Transfer, choose: random.Random, given: dict[str, str]) -> bool:
    value = transfer.encode()
    for account in transfer.amounts:
        transaction.produce(given["topic"], account, value)
        if choose.random() < 0.1:
            # In the logs, and open, for a while: somebody may die now.
            transaction.flush(choose.uniform(0.01, 1))
            time.sleep(choose.expovariate(10))
    if not transfer.is_meant:
        # What is only in the client's queue is never sent: an abort is of interest when it is in the log.
        transaction.flush(1)
    return transfer.is_meant


if __name__ == "__main__":
    run(main)
