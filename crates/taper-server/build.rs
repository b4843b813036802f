//! The page's files are held in the binary; the macro that does so does not tell of files that come or go.

fn main() {
    println!("cargo::rerun-if-changed=page");
}
