// Which words of two texts differ: a longest common subsequence of words.

// Pairs that the table may have; longer texts are compared up to their first and from their last difference only.
const MOST_PAIRS = 16_000_000;

/** The words of a text with what stands between them: `[{ text, word }]`. */
export function words(text) {
  return (text.match(/\s+|[\p{L}\p{N}\p{M}'’_-]+|[^\s\p{L}\p{N}\p{M}]/gu) || []).map((part) => ({
    text: part,
    word: !/^\s+$/.test(part),
  }));
}

/** For two lists of words: for each word whether the other list lacks it there. */
export function differences(a, b) {
  const onlyA = new Array(a.length).fill(false);
  const onlyB = new Array(b.length).fill(false);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let endA = a.length;
  let endB = b.length;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) {
    endA -= 1;
    endB -= 1;
  }
  const n = endA - start;
  const m = endB - start;
  if (n * m > MOST_PAIRS) {
    onlyA.fill(true, start, endA);
    onlyB.fill(true, start, endB);
    return [onlyA, onlyB];
  }
  const longest = table(a, b, start, n, m);
  let i = 0;
  let j = 0;
  while (i < n || j < m) {
    const at = i * (m + 1) + j;
    if (i < n && j < m && a[start + i] === b[start + j]) {
      i += 1;
      j += 1;
    } else if (j === m || (i < n && longest[at + m + 1] >= longest[at + 1])) {
      onlyA[start + i] = true;
      i += 1;
    } else {
      onlyB[start + j] = true;
      j += 1;
    }
  }
  return [onlyA, onlyB];
}

/** `[i * (m + 1) + j]`: how long the longest common subsequence of a from i and b from j is. */
function table(a, b, start, n, m) {
  const longest = new Uint16Array((n + 1) * (m + 1));
  for (let i = n - 1; i >= 0; i -= 1) {
    for (let j = m - 1; j >= 0; j -= 1) {
      const at = i * (m + 1) + j;
      const equal = a[start + i] === b[start + j];
      longest[at] = equal ? longest[at + m + 2] + 1 : Math.max(longest[at + m + 1], longest[at + 1]);
    }
  }
  return longest;
}

/**
 * Marks in two elements the words that the other one lacks, whatever Markdown made of them. Returns how many words
 * each has and how many are marked.
 */
export function markDifferences(left, right) {
  const [a, b] = [left, right].map(textWords);
  const [onlyA, onlyB] = differences(a.words, b.words);
  wrap(a, onlyA);
  wrap(b, onlyB);
  const count = (marks) => marks.filter(Boolean).length;
  return { words: [a.words.length, b.words.length], marked: [count(onlyA), count(onlyB)] };
}

/** The words under an element, and for each text node its parts. */
function textWords(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const nodes = [];
  const all = [];
  while (walker.nextNode()) {
    const parts = words(walker.currentNode.data);
    nodes.push({ node: walker.currentNode, parts });
    all.push(...parts.filter((part) => part.word).map((part) => part.text));
  }
  return { nodes, words: all };
}

function wrap({ nodes }, marks) {
  let at = 0;
  for (const { node, parts } of nodes) {
    const out = [];
    // Spaces between two marked words are marked with them.
    let run = "";
    let space = "";
    const flush = () => {
      if (run) out.push(mark(run));
      if (space) out.push(space);
      run = "";
      space = "";
    };
    for (const { text, word } of parts) {
      if (!word) {
        space += text;
      } else if (marks[at++]) {
        if (run) run += space;
        else if (space) out.push(space);
        space = "";
        run += text;
      } else {
        flush();
        out.push(text);
      }
    }
    flush();
    if (out.some((part) => typeof part !== "string")) node.replaceWith(...out);
  }
}

function mark(text) {
  const node = document.createElement("mark");
  node.textContent = text;
  return node;
}
