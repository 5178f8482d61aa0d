"""Read and write the partial results of partitions with Spark."""

import json
from collections.abc import Iterable
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from delivery.analytics.runs.manifest import Manifest, state_folder
from delivery.analytics.spark.journeys import HIGH_CARDINALITY_COLUMNS
from delivery.analytics.spark.segments import HadoopFiles


def write_table(rows: DataFrame, path: str) -> None:
    """Write a table, replacing an existing one."""
    plain = {f"parquet.enable.dictionary#{name}": "false" for name in HIGH_CARDINALITY_COLUMNS}
    rows.write.mode("overwrite").options(**plain).parquet(path)


class PartialResults:
    """Hold the partial results in `root` according to one manifest."""

    def __init__(self, spark: SparkSession, files: HadoopFiles, manifest: Manifest) -> None:
        self._spark = spark
        self._files = files
        self._manifest = manifest

    def table_path(self, run: int, table: str) -> str:
        """Return the path of a run's table."""
        return f"{self._files.root}/{state_folder(run)}/{table}"

    def read_table(self, table: str) -> DataFrame:
        """Read the rows of all partitions, each from its last run."""
        reader = self._spark.read.schema(
            StructType.fromJson(json.loads(self._manifest.schemas[table]))
        )
        found = [
            reader.parquet(self.table_path(run, table)).where(F.col("part").isin(*parts))
            for run, parts in self._manifest.parts_by_run().items()
        ]
        return reduce(DataFrame.unionByName, found)

    def compact(self, tables: Iterable[str], *, into_run: int) -> Manifest:
        """Merge the rows of all runs into one. Return the manifest, which the caller saves."""
        for table in tables:
            write_table(self.read_table(table), self.table_path(into_run, table))
        return self._manifest.compacted(into_run)
