"""Corners that generated batches rarely have, added to their files.

After the history, `CDC_DSN` alone orders records, so lines are shuffled. Customers become inactive and active again
within a day, and from one day to the next. Watches are placed, removed and placed again in one second. Transactions
of an account sum to nothing. FINWIRE files have other records.
"""

import random
from pathlib import Path

DAY = {2: "2017-07-08", 3: "2017-07-09"}


def add_corners(source, seed):
    """Change the files of the second and the third batch, and one of the history."""
    rng = random.Random(seed)
    finwire = min(Path(source, "Batch1").glob("FINWIRE*"))
    finwire.write_text(f"20110101-000000CMP{'Bank':<60}\n" + finwire.read_text(encoding="utf-8"), encoding="utf-8")
    inactive = {}
    for batch in (2, 3):
        folder = Path(source, f"Batch{batch}")
        files = {path.name: path.read_text(encoding="utf-8").splitlines() for path in folder.glob("*.txt")}
        del files["BatchDate.txt"]
        number = max(int(line.split("|")[1]) for lines in files.values() for line in lines)
        added = [*_customers(files["Customer.txt"], inactive, rng), *_watches(batch, files, rng), *_cash(batch, files)]
        for place, (name, flag, fields) in enumerate(added, number + 1):
            files[name].append("|".join([flag, str(place), *fields]))
        for name, lines in files.items():
            rng.shuffle(lines)
            (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _customers(lines, inactive, rng):
    """Return rows that make customers active again, and others that make them inactive for a moment, or for good."""
    last = {}
    for line in sorted(lines, key=lambda line: int(line.split("|")[1])):
        _, _, customer, *fields = line.split("|")
        last[customer] = fields
    for customer, fields in inactive.items():
        yield "Customer.txt", "U", [customer, *_changed(last.get(customer, fields), "ACTV", rng)]
    for customer, fields in sorted(last.items()):
        states = rng.choice([["INAC"], ["INAC", "ACTV"], ["ACTV", "INAC"], []])
        for state in states if fields[1] == "ACTV" else []:
            yield "Customer.txt", "U", [customer, *_changed(fields, state, rng)]
        if states and states[-1] == "INAC":
            inactive[customer] = fields


def _changed(fields, state, rng):
    changed = [fields[0], state, f"Again-{rng.randrange(10**9)}", *fields[3:]]
    return [value if place < 3 or rng.random() < 0.8 else "" for place, value in enumerate(changed)]


def _watches(batch, files, rng):
    """Return watches of new pairs that are placed and removed several times in one second."""
    history = "WatchHistory.txt"
    pairs = sorted({tuple(line.split("|")[2:4]) for line in files[history]})
    for place, (customer, symbol) in enumerate(pairs[:5]):
        at = f"{DAY[batch]} 23:59:{place:02}"
        state = max((line for line in files[history] if f"|{customer}|{symbol}|" in line), key=_at).rsplit("|", 1)[1]
        steps = ["CNCL", "ACTV"] if state == "ACTV" else ["ACTV", "CNCL", "ACTV"]
        for action in steps[: rng.randint(1, len(steps))]:
            yield history, "I", [customer, symbol, at, action]


def _at(line):
    return int(line.split("|")[1])


def _cash(batch, files):
    """Return transactions that take each other back."""
    for account in sorted({line.split("|")[2] for line in files["CashTransaction.txt"]})[:5]:
        for amount in ("12.50", "-12.50", "0.00", "-0.01", "0.01"):
            yield "CashTransaction.txt", "I", [account, f"{DAY[batch]} 00:00:00", amount, "back"]
