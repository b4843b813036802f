//! The figures as a picture: how the times are distributed.

use super::figures::{Figures, percentile};
use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 50.0;

/// Share of requests (or gaps) at most so long, over a logarithmic scale of milliseconds.
pub fn svg(figures: &Figures) -> String {
    let curves = [
        ("TTFT", "#0072b2", &figures.ttft.all),
        ("ITL", "#d55e00", &figures.itl.all),
        ("TPOT", "#009e73", &figures.tpot.all),
        ("end", "#666666", &figures.e2e.all),
    ];
    let values = || curves.iter().flat_map(|(.., all)| all.iter().copied()).filter(|&ms| ms > 0.0);
    let low = values().fold(f64::INFINITY, f64::min).clamp(0.01, 1e9).log10().floor();
    let high = values().fold(0.0, f64::max).clamp(0.1, 1e9).log10().ceil().max(low + 1.0);
    let x = |ms: f64| LEFT + (ms.max(0.01).log10() - low).max(0.0) / (high - low) * (WIDTH - LEFT - RIGHT);
    let y = |share: f64| TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"20\">{} completed, {:.1} tokens/s; share of times at most so long</text>\n",
        figures.completed, figures.total_per_s
    );
    let mut add = |text: String| _ = writeln!(out, "{text}");
    for decade in low as i32..=high as i32 {
        let ms = 10f64.powi(decade);
        let (at, end) = (x(ms), HEIGHT - BOTTOM);
        add(format!("<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{end}\" stroke=\"#ddd\"/>"));
        add(format!("<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{ms} ms</text>", end + 18.0));
    }
    for percent in [0, 50, 95, 100] {
        let at = y(f64::from(percent) / 100.0);
        add(format!("<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>", WIDTH - RIGHT));
        add(format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{percent} %</text>", LEFT - 6.0, at + 4.0));
    }
    for (place, (name, colour, all)) in curves.iter().enumerate() {
        let points: Vec<String> = (0..=200)
            .map(|i| f64::from(i) / 200.0)
            .map(|share| format!("{:.1},{:.1}", x(percentile(all, share)), y(share)))
            .collect();
        if !all.is_empty() {
            add(format!(
                "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/>",
                points.join(" ")
            ));
        }
        let at = LEFT + 80.0 * place as f64;
        add(format!("<text x=\"{at}\" y=\"{}\" fill=\"{colour}\">{name}</text>", HEIGHT - 10.0));
    }
    out + "</svg>\n"
}
