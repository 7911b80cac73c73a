import type { ReactNode } from "react";
export function Live(): ReactNode { return null; }
