//! Spherical k-means: unit centroids of vectors that are compared by their direction.

use candle_core::{Result, bail};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use taper_kernels::index::clusters::Centroids;

/// Rounds of assignment and averaging.
pub(super) const ROUNDS: usize = 10;

/// Vectors that one thread assigns at a time.
const CHUNK: usize = 1024;

/// What was found.
#[derive(Debug, Clone)]
pub(super) struct Clustering {
    /// Unit centroids `[clusters, d]`.
    pub centroids: Vec<f32>,
    /// The mean cosine of vectors with their centroids, at the start of each round and after the last.
    #[cfg_attr(not(test), expect(dead_code, reason = "the property that tests look at"))]
    pub objective: Vec<f64>,
}

/// Clusters the rows of `x` `[n, d]` by their directions: centroids begin as rows drawn at random; a cluster that has
/// become empty takes the row that fits worst into the largest. Equal `rng`s give equal clusters, on any number of
/// threads.
///
/// # Errors
/// Fewer rows than clusters.
pub(super) fn cluster(mut x: Vec<f32>, d: usize, clusters: usize, rng: &mut ChaCha8Rng) -> Result<Clustering> {
    let n = x.len() / d.max(1);
    if clusters == 0 || clusters > n {
        bail!("{clusters} clusters of {n} keys; valid are 1 to {n}");
    }
    x.par_chunks_exact_mut(d).for_each(normalise);
    let start = rand::seq::index::sample(rng, n, clusters);
    let mut centroids: Vec<f32> = start.iter().flat_map(|i| x[i * d..(i + 1) * d].iter().copied()).collect();
    let mut objective = Vec::with_capacity(ROUNDS + 1);
    for _ in 0..ROUNDS {
        let (mut own, fit) = assign(&x, d, &centroids)?;
        objective.push(mean(&fit));
        fill_empty(&mut own, &fit, clusters);
        average(&x, d, &own, &mut centroids);
    }
    objective.push(mean(&assign(&x, d, &centroids)?.1));
    Ok(Clustering { centroids, objective })
}

fn mean(fit: &[f32]) -> f64 {
    fit.iter().map(|&x| f64::from(x)).sum::<f64>() / fit.len() as f64
}

fn normalise(x: &mut [f32]) {
    let norm = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if norm > 0.0 {
        x.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

/// Each row's cluster, and its cosine with the centroid.
fn assign(x: &[f32], d: usize, centroids: &[f32]) -> Result<(Vec<u16>, Vec<f32>)> {
    let lookup = Centroids::new(centroids, d)?;
    let parts: Vec<(Vec<u16>, Vec<f32>)> = x
        .par_chunks(CHUNK * d)
        .map(|x| {
            let own = lookup.assign(x);
            let dot = |(x, &c): (&[f32], &u16)| {
                let centroid = &centroids[usize::from(c) * d..][..d];
                x.iter().zip(centroid).map(|(a, b)| a * b).sum::<f32>()
            };
            let fit = x.chunks_exact(d).zip(&own).map(dot).collect();
            (own, fit)
        })
        .collect();
    let (own, fit): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    Ok((own.concat(), fit.concat()))
}

/// Gives each empty cluster the row of the largest that fits it worst. No sum of cosines gets smaller by that: the row
/// is its own centroid then, and the others keep theirs.
fn fill_empty(own: &mut [u16], fit: &[f32], clusters: usize) {
    let mut sizes = vec![0usize; clusters];
    own.iter().for_each(|&c| sizes[usize::from(c)] += 1);
    for empty in 0..clusters {
        if sizes[empty] > 0 {
            continue;
        }
        let largest = (0..clusters).fold(0, |best, c| if sizes[c] > sizes[best] { c } else { best });
        let rows = (0..own.len()).filter(|&i| usize::from(own[i]) == largest);
        if let Some(worst) = rows.reduce(|a, b| if fit[b] < fit[a] { b } else { a }) {
            own[worst] = empty as u16;
            sizes[largest] -= 1;
            sizes[empty] = 1;
        }
    }
}

/// Sets each centroid to the direction of its rows' sum; rows whose sum vanishes leave it as it was.
fn average(x: &[f32], d: usize, own: &[u16], centroids: &mut [f32]) {
    let mut sums = vec![0f64; centroids.len()];
    for (x, &c) in x.chunks_exact(d).zip(own) {
        sums[usize::from(c) * d..][..d].iter_mut().zip(x).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    for (centroid, sum) in centroids.chunks_exact_mut(d).zip(sums.chunks_exact(d)) {
        let norm = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        if norm > 1e-9 {
            centroid.iter_mut().zip(sum).for_each(|(to, x)| *to = (x / norm) as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};

    fn rng(seed: u64) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(seed)
    }

    fn rows(seed: u64, n: usize, d: usize) -> Vec<f32> {
        let mut rng = rng(seed);
        (0..n * d).map(|_| rng.random_range(-1.0..1.0f32)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn it_never_gets_worse_and_leaves_no_cluster_empty(
            seed in 0u64..1000, n in 1usize..300, d in 1usize..9, part in 0.0f64..1.0, copies in 0usize..3,
        ) {
            let mut x = rows(seed, n, d);
            // Equal rows and zeros are what leaves clusters empty.
            for i in 0..n * copies / 3 {
                x.copy_within(..d, i * d);
            }
            let clusters = 1 + ((n - 1) as f64 * part) as usize;
            let found = cluster(x.clone(), d, clusters, &mut rng(seed)).unwrap();
            for pair in found.objective.windows(2) {
                prop_assert!(pair[1] >= pair[0] - 1e-6, "{:?}", found.objective);
            }
            for centroid in found.centroids.chunks_exact(d) {
                let norm: f32 = centroid.iter().map(|x| x * x).sum();
                prop_assert!((norm - 1.0).abs() < 1e-4);
            }
            // The lookup of a running model puts every key into the cluster whose centroid is nearest in angle.
            let own = Centroids::new(&found.centroids, d).unwrap().assign(&x);
            for (x, own) in x.chunks_exact(d).zip(own) {
                let cosine = |c: usize| x.iter().zip(&found.centroids[c * d..]).map(|(a, b)| a * b).sum::<f32>();
                let best = (0..clusters).map(cosine).fold(f32::NEG_INFINITY, f32::max);
                prop_assert!(cosine(usize::from(own)) >= best - 1e-5);
            }
        }
    }

    #[test]
    fn a_seed_gives_the_same_clusters_on_any_number_of_threads() {
        let x = rows(1, 5000, 8);
        let on = |threads: usize, seed| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| cluster(x.clone(), 8, 16, &mut rng(seed)).unwrap().centroids)
        };
        assert_eq!(on(1, 5), on(3, 5));
        assert_ne!(on(1, 5), on(1, 6));
    }

    #[test]
    fn planted_directions_are_found_whatever_the_lengths() {
        let (mut rng, mut x) = (rng(2), Vec::new());
        for i in 0..400 {
            let length = rng.random_range(0.1..10.0f32);
            for dim in 0..4 {
                let own = if dim == i % 4 { 1.0 } else { 0.0 };
                x.push(length * (own + rng.random_range(-0.05..0.05f32)));
            }
        }
        // Of several starts one finds them all; each finds what its start allows.
        let best = (0..8)
            .map(|seed| *cluster(x.clone(), 4, 4, &mut super::tests::rng(seed)).unwrap().objective.last().unwrap());
        assert!(best.fold(0.0, f64::max) > 0.99);
    }

    #[test]
    fn more_clusters_than_keys_is_an_error() {
        let error = |clusters| cluster(vec![1.0; 12], 4, clusters, &mut rng(0)).unwrap_err().to_string();
        assert!(error(4).contains("1 to 3") && error(0).contains("1 to 3"));
    }
}
