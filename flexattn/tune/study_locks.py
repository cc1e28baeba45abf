"""StudyLocks: who measures which point, a table beside Optuna's whose primary key is the lock."""

from __future__ import annotations

from typing import Any

_TABLE = "flexattn_claims"


class StudyLocks:
    """The points of one study with the number of the trial that owns each.

    Whether an owner lives, and what it measured, is the trial's own state: nothing is said twice.
    """

    def __init__(self, engine: Any, study: str) -> None:
        import sqlalchemy as sql

        self._engine, self._study = engine, study
        self._table = sql.Table(
            _TABLE,
            sql.MetaData(),
            sql.Column("study", sql.String(128), primary_key=True),
            sql.Column("point", sql.Integer, primary_key=True, autoincrement=False),
            sql.Column("trial", sql.Integer, nullable=False),
        )
        try:
            self._table.create(engine, checkfirst=True)
        except sql.exc.DatabaseError:
            # Another worker made it between the look and the making.
            self._table.create(engine, checkfirst=True)

    def claim(self, point: int, trial: int) -> bool:
        """Own a point that nobody owns; one of any number of workers succeeds."""
        import sqlalchemy as sql

        row = {"study": self._study, "point": point, "trial": trial}
        try:
            with self._engine.begin() as connection:
                connection.execute(sql.insert(self._table).values(row))
        except sql.exc.IntegrityError:
            return False
        return True

    def take_over(self, point: int, dead: int, trial: int) -> bool:
        """Own a point that a dead trial owns; one of any number of workers succeeds."""
        import sqlalchemy as sql

        columns = self._table.c
        same = sql.and_(columns.study == self._study, columns.point == point)
        change = sql.update(self._table).where(same, columns.trial == dead).values(trial=trial)
        with self._engine.begin() as connection:
            return bool(connection.execute(change).rowcount == 1)

    def owners(self) -> dict[int, int]:
        """The trial that owns each point."""
        import sqlalchemy as sql

        columns = self._table.c
        asked = sql.select(columns.point, columns.trial).where(columns.study == self._study)
        with self._engine.connect() as connection:
            return {point: trial for point, trial in connection.execute(asked)}
