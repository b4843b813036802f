//! How much memory is free where a model shall be, and sizes as people read them.

use candle_core::Device;
use std::path::Path;

/// Bytes as a person reads them, such as `15.0 GiB`.
pub fn size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..0x10_0000 => (1 << 10, "KiB"),
        0x10_0000..0x4000_0000 => (1 << 20, "MiB"),
        _ => (1u64 << 30, "GiB"),
    };
    format!("{:.1} {name}", bytes as f64 / unit as f64)
}

/// Bytes that the device could give now, where it says so.
pub fn free_memory(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        let (free, _) = cuda.cuda_stream().context().mem_get_info().ok()?;
        return Some(free as u64);
    }
    if !device.is_cpu() {
        return None;
    }
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some((kib * 1024).min(within_groups(Path::new("/sys/fs/cgroup"), &groups).unwrap_or(u64::MAX)))
}

/// The least that the limits of a process's control groups (a container's, version 2) leave, from its own up to the root;
/// none without a limit. `groups` is what the system says of them.
fn within_groups(root: &Path, groups: &str) -> Option<u64> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let folders = Path::new(own).ancestors().map(|part| root.join(part));
    folders.filter_map(|folder| within_group(&folder)).min()
}

/// What the limit of one control group leaves, files that it may forget included; none without a limit.
fn within_group(folder: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let stat = read("memory.stat")?;
    let forgettable: u64 = stat.lines().find_map(|line| line.strip_prefix("inactive_file "))?.trim().parse().ok()?;
    Some(number("memory.max")?.saturating_sub(number("memory.current")?.saturating_sub(forgettable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_unit_that_leaves_few_digits() {
        let sizes = [512, 3 << 19, 141 << 30].map(size);
        assert_eq!(sizes, ["0.5 KiB", "1.5 MiB", "141.0 GiB"]);
    }

    #[test]
    fn a_control_groups_limit_counts_files_that_it_may_forget_as_free() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(within_group(folder.path()), None, "no control group");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.stat", "anon 2000\nfile 1500\ninactive_file 1000\n");
        write("memory.current", "3500\n");
        for (most, left) in [("max\n", None), ("4000\n", Some(1500)), ("2000\n", Some(0))] {
            write("memory.max", most);
            assert_eq!(within_group(folder.path()), left, "{most}");
            // That of a group around a process's own.
            for own in ["0::/\n", "0::/outer/inner\n", "1:name=x:/y\n0::/outer\n", ""] {
                assert_eq!(within_groups(folder.path(), own), left, "{own}");
            }
        }
        let inner = folder.path().join("outer/inner");
        std::fs::create_dir_all(&inner).unwrap();
        write("memory.max", "4000\n");
        for (name, text) in
            [("memory.stat", "inactive_file 0\n"), ("memory.current", "300\n"), ("memory.max", "1000\n")]
        {
            std::fs::write(inner.join(name), text).unwrap();
        }
        let left = ["0::/\n", "0::/outer\n", "0::/outer/inner\n"].map(|own| within_groups(folder.path(), own));
        assert_eq!(left, [Some(1500), Some(1500), Some(700)]);
    }
}
