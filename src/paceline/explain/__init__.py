"""The pictures, and the numbers behind them: trace, report, scaling, comparison."""
