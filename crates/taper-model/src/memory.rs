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
    Some(host().filter(|_| device.is_cpu())?.free)
}

/// The most that a device could give: in host memory with what the system would move to its swap space, and with all files
/// that it could read again.
pub(crate) fn most_memory(device: &Device) -> Option<u64> {
    if device.is_cpu() { Some(host()?.most) } else { free_memory(device) }
}

/// Bytes of host memory that this process could have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Host {
    /// At no one's cost.
    free: u64,
    /// At the cost of whatever can be moved to swap space or read again.
    most: u64,
}

impl Host {
    fn least(self, other: Self) -> Self {
        Self { free: self.free.min(other.free), most: self.most.min(other.most) }
    }
}

fn host() -> Option<Host> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    };
    let (free, swap) = (bytes("MemAvailable:")?, bytes("SwapFree:").unwrap_or(0));
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let within = within_groups(Path::new("/sys/fs/cgroup"), &groups, swap);
    let whole = Host { free, most: free.saturating_add(swap) };
    Some(within.map_or(whole, |within| whole.least(within)))
}

/// The least that the limits of a process's control groups (a container's) leave, from its own up to the root; none without a
/// limit. `groups` is what the system says of them, `swap` the bytes of swap space that it has left.
fn within_groups(root: &Path, groups: &str, swap: u64) -> Option<Host> {
    // Version 1 has a tree for each kind of limit, version 2 one for all.
    let in_tree = |line: &str| {
        let (kinds, path) = line.split_once(':')?.1.split_once(":/")?;
        match kinds {
            "" => Some((root.to_owned(), path.to_owned())),
            _ if kinds.split(',').any(|kind| kind == "memory") => Some((root.join("memory"), path.to_owned())),
            _ => None,
        }
    };
    let own = groups.lines().filter_map(in_tree).chain([(root.to_owned(), String::new())]);
    let left = own.flat_map(|(tree, path)| {
        let folders: Vec<_> = Path::new(&path).ancestors().map(|part| tree.join(part)).collect();
        folders.into_iter().filter_map(|folder| within_group(&folder, swap))
    });
    left.reduce(Host::least)
}

/// What the limit of one control group leaves, of version 2 or 1; none without a limit.
fn within_group(folder: &Path, swap: u64) -> Option<Host> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let stat = read("memory.stat")?;
    // Version 1 has sums over the groups within under names of their own.
    let count = |name: &str| {
        let count = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        count(&format!("total_{name} ")).or_else(|| count(&format!("{name} "))).unwrap_or(0)
    };
    let (limit, used, swap_left) = match number("memory.current") {
        Some(used) => {
            let swapped = || number("memory.swap.current").unwrap_or(0);
            (number("memory.max")?, used, number("memory.swap.max").map(|most| most.saturating_sub(swapped())))
        }
        None => {
            let (limit, used) = (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?);
            // Of memory and swap space together.
            let both = number("memory.memsw.limit_in_bytes").zip(number("memory.memsw.usage_in_bytes"));
            let swap_left =
                |(most, all): (u64, u64)| most.saturating_sub(limit).saturating_sub(all.saturating_sub(used));
            (limit, used, both.map(swap_left))
        }
    };
    let (idle, in_use) = (count("inactive_file"), count("active_file"));
    let without = |files: u64| limit.saturating_sub(used.saturating_sub(files));
    Some(Host { free: without(idle), most: without(idle + in_use).saturating_add(swap_left.unwrap_or(swap).min(swap)) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn sizes_have_the_unit_that_leaves_few_digits() {
        let sizes = [512, 3 << 19, 141 << 30].map(size);
        assert_eq!(sizes, ["0.5 KiB", "1.5 MiB", "141.0 GiB"]);
    }

    /// A control group's files, each of one line but `memory.stat`.
    fn write(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), format!("{text}\n")).unwrap();
        }
    }

    #[test]
    fn a_control_groups_limit_counts_files_that_it_may_forget_as_free() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(within_group(root, 0), None, "no control group");
        write(root, &[("memory.stat", "anon 2000\nfile 1500\ninactive_file 1000\nactive_file 400")]);
        write(root, &[("memory.current", "3500")]);
        for (most, left) in [("max", None), ("4000", Some((1500, 1900))), ("2000", Some((0, 0)))] {
            write(root, &[("memory.max", most)]);
            let left = left.map(|(free, most)| Host { free, most });
            assert_eq!(within_group(root, 0), left, "{most}");
            // That of a group around a process's own.
            for own in ["0::/", "0::/outer/inner", "1:name=x:/y\n0::/outer", ""] {
                assert_eq!(within_groups(root, own, 0), left, "{own}");
            }
        }
        write(root, &[("memory.max", "4000")]);
        let inner = [("memory.stat", "inactive_file 0"), ("memory.current", "300"), ("memory.max", "1000")];
        write(&root.join("outer/inner"), &inner);
        let free = |own| within_groups(root, own, 0).unwrap().free;
        assert_eq!(["0::/", "0::/outer", "0::/outer/inner"].map(free), [1500, 1500, 700]);
        // Swap space is the system's, as far as the group may have it.
        let most = || within_groups(root, "0::/outer/inner", 500).unwrap().most;
        assert_eq!(most(), 1200);
        write(&root.join("outer/inner"), &[("memory.swap.max", "90"), ("memory.swap.current", "20")]);
        assert_eq!(most(), 770);
    }

    #[test]
    fn a_control_group_of_version_1_has_other_names_in_a_tree_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let limits = [("memory.limit_in_bytes", "9223372036854771712"), ("memory.usage_in_bytes", "9000")];
        write(&root.join("memory"), &limits);
        write(&root.join("memory"), &[("memory.stat", "inactive_file 0\ntotal_inactive_file 4000")]);
        let own = "9:name=systemd:/\n5:cpu,memory:/a/b\n0::/\n";
        assert_eq!(within_groups(root, own, 0).unwrap().free, 9223372036854771712 - 5000, "no limit");
        let stat = "cache 300\ninactive_file 1\nactive_file 2\ntotal_inactive_file 200\ntotal_active_file 100";
        let inner = [("memory.limit_in_bytes", "2000"), ("memory.usage_in_bytes", "1500"), ("memory.stat", stat)];
        write(&root.join("memory/a"), &inner);
        assert_eq!(within_groups(root, own, 50), Some(Host { free: 700, most: 850 }));
        // Of which 10 are in swap space already.
        write(&root.join("memory/a"), &[("memory.memsw.limit_in_bytes", "2030")]);
        write(&root.join("memory/a"), &[("memory.memsw.usage_in_bytes", "1510")]);
        assert_eq!(within_groups(root, own, 50), Some(Host { free: 700, most: 820 }));
        assert_eq!(within_groups(root, "5:cpu,memory:/elsewhere\n", 50).unwrap().free, 9223372036854771712 - 5000);
    }
}
