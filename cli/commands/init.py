"""`headrace init`: create a folder with a working pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headrace.cli.arguments.options import FOLDER, ReportingCommand, pass_console
from headrace.cli.reporting.blocks import Text
from headrace.cli.reporting.errors import OutputFileError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cli.reporting.console import Console

__all__ = ["FILES", "PIPELINE", "init"]

PIPELINE = """\
# A pipeline: records arrive as files, meet dimensions, and land in Delta tables, each exactly once.
#   headrace run pipeline.yml --once       loads what is there
#   headrace run pipeline.yml --follow     goes on loading what arrives
# Paths are relative to this file. ${NAME} is replaced by the environment's variable.

name: orders

source:
  format: csv                    # or json, parquet
  path: incoming                 # a folder that receives files; each file is loaded once
  header: true                   # the first record names the columns
  time_zone: UTC                 # zone of times that name none
  schema:                        # name and type of each column
    order_id: bigint
    customer: string
    product: string
    ordered_at: timestamp
    amount: decimal(10,2)

dimensions:
  customer:
    path: warehouse/dim_customer # a Delta table
    natural_key: [customer]      # what names a member in the source; several columns are fine
    columns:                     # when given, a missing table is created with them
      customer: string
      name: string
      country: string
    rules:
      customer: [trim, casefold] # 'C1 ' and 'c1' are one customer
  product:
    path: warehouse/dim_product
    natural_key: [product]
    columns:
      product: string
      title: string

lookups:                         # each adds a column <role>_key to the facts
  - role: customer
    dimension: customer
    on: {customer: customer}     # stream column: natural key column
    policy: infer                # a key that is not there becomes a new member;
                                 # or unknown (key -1), reject (to the error table), fail (the run stops)
  - role: product
    dimension: product
    on: {product: product}
    policy: infer

# transform:                     # steps between the source and the lookups, in order
#   - where: amount > 0          # Spark SQL; other records are filtered out, and counted
#   - derive: {ordered_on: CAST(ordered_at AS date)}
#   - rename: {product: sku}
#   - select: [order_id, customer, sku, ordered_on, amount]
#   - python: rules:clean        # clean(frame) in rules.py next to this file; runs your code

duplicates:                      # a record whose key was loaded before, or occurs twice in a batch
  key: [order_id]
  action: drop                   # or flag, route (to a table of their own)

sink:
  path: warehouse/fact_orders    # rejected rows go to warehouse/fact_orders_errors
  # mode: merge                  # a later record of a key updates its fact, as when an order is shipped;
  # key: [order_id]              # remove `duplicates` for that
  # order_by: [ordered_at]       # the last by these columns wins
  audit: true                    # facts say where they came from: _file, _batch, _loaded_at

trigger:
  max_files: 100                 # files in a batch
  interval: 1s                   # least time from one batch to the next

memory: 64MiB                    # of all joins in one worker
"""

CUSTOMERS = """\
customer,name,country
c1,Ada,UK
c2,Grace,US
"""

ORDERS = """\
order_id,customer,product,ordered_at,amount
1,c1,p1,2024-05-01 08:00:00,10.00
2,C2 ,p2,2024-05-01 08:05:00,25.50
3,c3,p1,2024-05-01 08:07:00,12.75
3,c3,p1,2024-05-01 08:07:00,12.75
4,,p3,2024-05-01 08:09:00,5.00
"""

IGNORE = """\
.headrace/
warehouse/
"""

FILES = {"pipeline.yml": PIPELINE, "customers.csv": CUSTOMERS, "incoming/orders-1.csv": ORDERS, ".gitignore": IGNORE}


@click.command("init", cls=ReportingCommand, short_help="Write a pipeline file and example rows.")
@click.argument("folder", type=FOLDER, default=".")
@pass_console
def init(console: Console, /, folder: Path) -> None:
    """Write a commented pipeline file and a few example rows into FOLDER, as a starting point for your own pipeline.

    Existing files are not changed.
    """
    with console.step(f"writing a project into {folder}", left="nothing was written over"):
        taken = [name for name in FILES if name != ".gitignore" and (folder / name).exists()]
        if taken:
            raise OutputFileError(f"{folder / taken[0]} is already there; name another folder")
        for name, text in FILES.items():
            _write_new(folder / name, text)
    console.result({"folder": str(folder), "files": list(FILES)}, Text(_next_steps(folder)))


def _write_new(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(text)


def _next_steps(folder: Path) -> str:
    enter = "" if folder.resolve() == folder.cwd() else f"  cd {folder}\n"
    return (
        f"Wrote {', '.join(FILES)}. Next:\n{enter}"
        "  headrace dimension create customer customers.csv    known customers become members 1, 2, ...\n"
        "  headrace run pipeline.yml --once                    five orders: one duplicate, one without a customer\n"
        "then change pipeline.yml to your own data."
    )
