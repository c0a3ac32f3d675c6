"""`Report`: the settings, rows and verdicts of a case."""

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Verdict:
    """A claim, whether the rows bear it out, and the figures that say so. Both are computed from the rows."""

    claim: str
    holds: bool
    measured: str


@dataclass
class Report:
    """What a case measured."""

    settings: dict
    columns: list
    rows: list = field(default_factory=list)
    verdicts: list = field(default_factory=list)

    def add(self, row):
        """Add a row, and show it at once, since the next one may take a while."""
        self.rows.append(row)
        print("  ".join(f"{name} {_shown(value)}" for name, value in zip(self.columns, row, strict=True)), flush=True)

    def judge(self, claim, holds, measured):
        """Add a verdict."""
        self.verdicts.append(Verdict(claim, bool(holds), measured))

    def text(self):
        """Return the report for the terminal."""
        lines = [f"   {name}: {value}" for name, value in self.settings.items()]
        table = [self.columns, *([_shown(value) for value in row] for row in self.rows)]
        widths = [max(len(row[at]) for row in table) for at in range(len(self.columns))]
        lines += ["  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True)) for row in table]
        for verdict in self.verdicts:
            lines.append(f"{'holds' if verdict.holds else 'DOES NOT HOLD'}: {verdict.claim} ({verdict.measured})")
        return "\n".join(lines)

    def content(self):
        """Return the report for a JSON file."""
        return asdict(self)


def _shown(value):
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
