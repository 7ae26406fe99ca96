"""One self-contained HTML page: no script, no request, every name escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from jaxpar.report.text import row_cells, tour_verdict
from jaxpar.serve.closed_form import CARDS
from jaxpar.strategies.compose import all_strategies
from jaxpar.tour import Tour


def tour_page(tour: Tour) -> str:
    """The tour as a page: verdict, table, and each strategy's card."""
    environment = Environment(
        loader=PackageLoader("jaxpar.report"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = [(row, [[str(cell) for cell in cells] for cells in row_cells(row)]) for row in tour.rows]
    return environment.get_template("tour.html.j2").render(
        tour=tour,
        verdict=str(tour_verdict(tour)),
        rows=rows,
        cards=[*(s.card for s in all_strategies().values()), *CARDS.values()],
    )
