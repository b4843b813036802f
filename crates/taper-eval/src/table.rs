//! Results as tables: aligned text for a terminal, Markdown for a page.

use crate::results::Cell;
use crate::tasks::Task;

/// How a table is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Columns padded to equal width.
    Text,
    /// Pipes.
    Markdown,
}

/// Accuracies in percent with their standard errors: a row for each length and pair of methods, a column for each task.
pub fn accuracies(cells: &[Cell], style: Style) -> String {
    let tasks: Vec<Task> = Task::ALL.into_iter().filter(|task| cells.iter().any(|cell| cell.task == *task)).collect();
    let mut rows: Vec<(usize, &str, &str)> = Vec::new();
    for cell in cells {
        let row = (cell.length, cell.prefill.as_str(), cell.decode.as_str());
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    let mut lines = vec![vec!["length".to_owned(), "prefill".into(), "decode".into()]];
    lines[0].extend(tasks.iter().map(ToString::to_string));
    for row in rows {
        let cell = |task: Task| cells.iter().find(|c| c.task == task && (c.length, &*c.prefill, &*c.decode) == row);
        let mut line = vec![row.0.to_string(), row.1.to_owned(), row.2.to_owned()];
        line.extend(tasks.iter().map(|&task| cell(task).map_or(String::new(), accuracy)));
        lines.push(line);
    }
    draw(&lines, style)
}

/// Everything of every cell, one a row.
pub fn details(cells: &[Cell], style: Style) -> String {
    let head = [
        "length",
        "task",
        "prefill",
        "decode",
        "samples",
        "accuracy",
        "prefill density",
        "decode density",
        "prefill error",
        "decode error",
        "prefill s",
        "decode s",
    ];
    let share = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.4}"));
    let rows = cells.iter().map(|cell| {
        vec![
            cell.length.to_string(),
            cell.task.to_string(),
            cell.prefill.clone(),
            cell.decode.clone(),
            cell.samples.to_string(),
            accuracy(cell),
            share(Some(cell.prefill_density)),
            share(cell.decode_density),
            share(cell.prefill_error),
            share(cell.decode_error),
            format!("{:.2}", cell.prefill_s),
            format!("{:.2}", cell.decode_s),
        ]
    });
    let lines: Vec<Vec<String>> = std::iter::once(head.map(str::to_owned).to_vec()).chain(rows).collect();
    draw(&lines, style)
}

/// Percent.
fn accuracy(cell: &Cell) -> String {
    let error = cell.standard_error.map_or(String::new(), |error| format!(" ± {:.1}", 100.0 * error));
    format!("{:.1}{error}", 100.0 * cell.accuracy)
}

/// The first line is the head.
pub(crate) fn draw(lines: &[Vec<String>], style: Style) -> String {
    let mut out = String::new();
    match style {
        Style::Markdown => {
            for (index, line) in lines.iter().enumerate() {
                out.push_str(&format!("| {} |\n", line.join(" | ")));
                if index == 0 {
                    out.push_str(&format!("|{}\n", " --- |".repeat(line.len())));
                }
            }
        }
        Style::Text => {
            let columns = lines.first().map_or(0, Vec::len);
            let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
            let widths: Vec<usize> = (0..columns).map(width).collect();
            for line in lines {
                let padded: Vec<String> = line.iter().zip(&widths).map(|(text, &w)| format!("{text:<w$}")).collect();
                out.push_str(padded.join("  ").trim_end());
                out.push('\n');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(task: Task, length: usize, prefill: &str, accuracy: f64) -> Cell {
        Cell {
            task,
            length,
            prefill: prefill.into(),
            decode: "dense".into(),
            samples: 4,
            accuracy,
            standard_error: (accuracy < 1.0).then_some(0.125),
            prefill_density: 0.25,
            decode_density: Some(1.0),
            prefill_error: None,
            decode_error: Some(0.0),
            prefill_s: 1.5,
            decode_s: 0.25,
        }
    }

    fn cells() -> Vec<Cell> {
        vec![
            cell(Task::MultiKey3, 4096, "dense", 1.0),
            cell(Task::Single1, 4096, "dense", 0.75),
            cell(Task::MultiKey3, 8192, "delta gamma=64", 0.5),
        ]
    }

    #[test]
    fn accuracies_stand_by_task() {
        let text = "\
length  prefill         decode  single_1     multikey_3
4096    dense           dense   75.0 ± 12.5  100.0
8192    delta gamma=64  dense                50.0 ± 12.5
";
        assert_eq!(accuracies(&cells(), Style::Text), text);
        let markdown = "\
| length | prefill | decode | single_1 | multikey_3 |
| --- | --- | --- | --- | --- |
| 4096 | dense | dense | 75.0 ± 12.5 | 100.0 |
| 8192 | delta gamma=64 | dense |  | 50.0 ± 12.5 |
";
        assert_eq!(accuracies(&cells(), Style::Markdown), markdown);
    }

    #[test]
    fn details_have_a_row_for_each_cell() {
        let text = details(&cells(), Style::Markdown);
        assert_eq!(text.lines().count(), 5);
        assert!(
            text.contains(
                "| 4096 | multikey_3 | dense | dense | 4 | 100.0 | 0.2500 | 1.0000 |  | 0.0000 | 1.50 | 0.25 |"
            )
        );
        assert_eq!(details(&[], Style::Text).lines().count(), 1);
    }
}
