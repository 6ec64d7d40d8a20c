"""Reports of runs: charts, timelines and stories on one HTML page."""

from tp_trainer._reports._charts import charts as charts
from tp_trainer._reports._figures import draw as draw
from tp_trainer._reports._figures import svg as svg
from tp_trainer._reports._pages import write_page as write_page
from tp_trainer._reports._pages import write_report as write_report
